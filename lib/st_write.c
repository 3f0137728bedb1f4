/* st_write.c: see st_write.h. */
#include "st_write.h"

#include "json_out.h"

#include <string.h>

int qx_st_header(struct qx_buf *out, struct qx_st_tensor *t, size_t n,
                 const struct qx_st_pair *meta, size_t n_meta, uint64_t align, uint64_t *file_bytes,
                 struct qx_error *err)
{
    struct qx_json_out o;
    uint64_t at = 0;
    qx_json_out_init(&o, false);
    qx_json_obj(&o, NULL);
    if (n_meta > 0) {
        qx_json_obj(&o, "__metadata__");
        for (size_t i = 0; i < n_meta; i++) {
            qx_json_str(&o, meta[i].key, meta[i].value);
        }
        qx_json_obj_end(&o);
    }
    bool fits = true;
    for (size_t i = 0; i < n; i++) {
        qx_json_obj(&o, t[i].name);
        qx_json_str(&o, "dtype", t[i].dtype);
        qx_json_arr(&o, "shape");
        for (uint32_t d = 0; d < t[i].n_dims; d++) {
            qx_json_u64(&o, NULL, t[i].shape[d]);
        }
        qx_json_arr_end(&o);
        qx_json_arr(&o, "data_offsets");
        qx_json_u64(&o, NULL, at);
        t[i].off = at;
        fits = fits && qx_add_u64(at, t[i].size_bytes, &at);
        qx_json_u64(&o, NULL, at);
        qx_json_arr_end(&o);
        qx_json_obj_end(&o);
    }
    qx_json_obj_end(&o);
    int rc = 0;
    uint64_t data = 0, total = 0;
    if (o.buf.failed) {
        rc = qx_fail_nomem(err);
    } else if (!fits || !qx_align_u64(8 + o.buf.n, align, &data) || !qx_add_u64(data, at, &total)) {
        rc = qx_fail(err, QX_E_RANGE, "file-size", "the file would be larger than 2^64 bytes");
    }
    if (rc == 0) {
        uint64_t length = data - 8;
        char head[8];
        for (int i = 0; i < 8; i++) {
            head[i] = (char)(length >> (8 * i));
        }
        qx_buf_add(out, head, 8);
        qx_buf_add(out, o.buf.p, o.buf.n);
        for (uint64_t i = o.buf.n; i < length; i++) {
            qx_buf_chr(out, ' ');
        }
        for (size_t i = 0; i < n; i++) {
            t[i].off += data;
        }
        *file_bytes = total;
        rc = out->failed ? qx_fail_nomem(err) : 0;
    }
    qx_json_out_fini(&o);
    return rc;
}

bool qx_st_header_pad(struct qx_buf *header, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        qx_buf_chr(header, ' ');
    }
    if (header->failed) {
        return false;
    }
    uint64_t length = header->n - 8;
    for (int i = 0; i < 8; i++) {
        header->p[i] = (char)(length >> (8 * i));
    }
    return true;
}

int qx_st_index(struct qx_buf *out, const struct qx_st_place *p, size_t n, uint64_t total_bytes,
                struct qx_error *err)
{
    struct qx_json_out o;
    qx_json_out_init(&o, true);
    qx_json_obj(&o, NULL);
    qx_json_obj(&o, "metadata");
    qx_json_u64(&o, "total_size", total_bytes);
    qx_json_obj_end(&o);
    qx_json_obj(&o, "weight_map");
    for (size_t i = 0; i < n; i++) {
        qx_json_str(&o, p[i].tensor, p[i].file);
    }
    qx_json_obj_end(&o);
    qx_json_obj_end(&o);
    qx_buf_chr(&o.buf, '\n');
    qx_buf_add(out, o.buf.p, o.buf.n);
    int rc = o.buf.failed || out->failed ? qx_fail_nomem(err) : 0;
    qx_json_out_fini(&o);
    return rc;
}
