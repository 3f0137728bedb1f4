/* tok_load.c: the tokenizer and the chat template of a checkpoint's directory. */
#include "tok.h"

#include "alloc.h"
#include "ckpt.h"

#define MAX_FILE_BYTES (512u << 20)

int qx_tok_load(struct qx_tok **out, const struct qx_ckpt *ck, struct qx_error *err)
{
    char *text = NULL, *config = NULL;
    size_t n = 0, n_config = 0;
    bool present = false, has_config = false;
    *out = NULL;
    int rc = qx_ckpt_read_small(ck, "tokenizer.json", MAX_FILE_BYTES, &text, &n, &present, err);
    if (rc == 0 && !present) {
        rc = qx_fail(err, QX_E_NOT_FOUND, "tokenizer-missing", "there is no tokenizer.json in '%s'",
                     qx_ckpt_path(ck));
    }
    if (rc == 0) {
        rc = qx_ckpt_read_small(ck, "tokenizer_config.json", MAX_FILE_BYTES, &config, &n_config,
                                &has_config, err);
    }
    if (rc == 0) {
        rc = qx_tok_parse(out, text, n, "tokenizer.json", has_config ? config : NULL, n_config, err);
    }
    qx_free(text);
    qx_free(config);
    return rc;
}

