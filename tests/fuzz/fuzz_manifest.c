/* Checksum lists: entries of an accepted list are complete, and written out again they parse to the same
 * digests. */
#include "fuzz.h"

#include "manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = qx_alloc_live();
    char *text = fuzz_copy(data, size);
    struct qx_manifest *m;
    struct qx_error err = {0};
    int rc = qx_manifest_parse(&m, text, size, "list", &err);
    CHECK(rc == 0 || (!m && err.kind && err.msg[0]));
    if (rc == 0) {
        struct qx_buf out = {0};
        size_t files = 0;
        CHECK(qx_manifest_count(m) > 0);
        qx_manifest_put_head(&out);
        for (size_t i = 0; i < qx_manifest_count(m); i++) {
            const struct qx_manifest_entry *e = qx_manifest_at(m, i);
            CHECK(e->kind < QX_DIGEST_COUNT && e->name && e->name[0]);
            CHECK(qx_manifest_find(m, e->is_tensor, (enum qx_digest)e->kind, e->name) < qx_manifest_count(m));
            if (!e->is_tensor) {
                qx_manifest_put_file(&out, (enum qx_digest)e->kind, e->digest, e->size_bytes, e->name);
                files++;
            }
        }
        if (files) {
            struct qx_manifest *again;
            CHECK(qx_manifest_parse(&again, out.p, out.n, "again", &err) == 0);
            CHECK(qx_manifest_count(again) <= files);
            for (size_t i = 0; i < qx_manifest_count(again); i++) {
                const struct qx_manifest_entry *e = qx_manifest_at(again, i);
                size_t k = qx_manifest_find(m, false, (enum qx_digest)e->kind, e->name);
                CHECK(k < qx_manifest_count(m));
                CHECK(memcmp(qx_manifest_at(m, k)->digest, e->digest, qx_digest_size((enum qx_digest)e->kind)) == 0);
            }
            qx_manifest_destroy(again);
        }
        qx_buf_fini(&out);
    }
    qx_manifest_destroy(m);
    free(text);
    CHECK(qx_alloc_live() == live);
    return 0;
}
