/* A whole safetensors file. Every tensor called readable lies inside it with the size its shape asks for;
 * without findings the tensors cover the data exactly; and an accepted header, printed and parsed again,
 * gives the same tensors. */
#include "fuzz.h"

#include "json_out.h"
#include "name_sort.h"
#include "st_header.h"
#include "utf8.h"

static void check_tensors(const struct qx_st_header *h, uint64_t file_bytes, bool clean)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < h->n_tensors; i++) {
        const struct qx_tensor *t = &h->tensors[i];
        CHECK(strlen(t->name) <= t->name_len && qx_utf8_valid(t->name, t->name_len));
        CHECK(i == 0 || qx_name_compare(t[-1].name, t[-1].name_len, t->name, t->name_len) < 0);
        CHECK(!clean || t->readable);
        if (t->readable) {
            uint64_t n = 1;
            for (uint8_t d = 0; d < t->n_dims; d++) {
                n *= t->shape[d];
            }
            CHECK(t->n_elems == n && t->size_bytes == n * qx_dtype_size((enum qx_dtype)t->dtype));
            CHECK(t->off >= h->data_off && t->off <= file_bytes && t->size_bytes <= file_bytes - t->off);
            sum += t->size_bytes;
        }
    }
    CHECK(!clean || sum == file_bytes - h->data_off);
}

static void print(const struct qx_st_header *h, struct qx_json_out *o)
{
    qx_json_out_init(o, false);
    qx_json_obj(o, NULL);
    for (size_t i = 0; i < h->n_tensors; i++) {
        const struct qx_tensor *t = &h->tensors[i];
        char key[64];
        struct qx_buf name = {0};
        /* the writer takes keys as C strings: names with a NUL get another one */
        snprintf(key, sizeof key, "nul %zu", i);
        qx_buf_add(&name, t->name, t->name_len);
        qx_json_obj(o, strlen(t->name) == t->name_len ? qx_buf_cstr(&name) : key);
        qx_json_str(o, "dtype", qx_dtype_name((enum qx_dtype)t->dtype));
        qx_json_arr(o, "shape");
        for (uint8_t d = 0; d < t->n_dims; d++) {
            qx_json_u64(o, NULL, t->shape[d]);
        }
        qx_json_arr_end(o);
        qx_json_arr(o, "data_offsets");
        qx_json_u64(o, NULL, t->off - h->data_off);
        qx_json_u64(o, NULL, t->off - h->data_off + t->size_bytes);
        qx_json_arr_end(o);
        qx_json_obj_end(o);
        qx_buf_fini(&name);
    }
    qx_json_obj_end(o);
}

static void check_again(const struct qx_st_header *h, uint64_t data_bytes)
{
    struct qx_json_out o;
    struct qx_st_header again;
    struct qx_findings *fs = qx_findings_create();
    print(h, &o);
    CHECK(!o.buf.failed && fs);
    CHECK(qx_st_header_parse(&again, o.buf.p, o.buf.n, 8 + o.buf.n + data_bytes, "again", fs, NULL) == 0);
    CHECK(qx_findings_count(fs) == 0 && again.n_tensors == h->n_tensors);
    for (size_t i = 0; i < h->n_tensors; i++) {
        const struct qx_tensor *t = &h->tensors[i];
        if (strlen(t->name) != t->name_len) {
            continue;
        }
        bool found = false;
        for (size_t k = 0; k < again.n_tensors && !found; k++) {
            const struct qx_tensor *u = &again.tensors[k];
            found = u->name_len == t->name_len && memcmp(u->name, t->name, t->name_len) == 0;
            CHECK(!found || (u->dtype == t->dtype && u->size_bytes == t->size_bytes &&
                             u->off - again.data_off == t->off - h->data_off && u->n_dims == t->n_dims &&
                             memcmp(u->shape, t->shape, t->n_dims * sizeof *t->shape) == 0));
        }
        CHECK(found);
    }
    qx_st_header_fini(&again);
    qx_findings_destroy(fs);
    qx_json_out_fini(&o);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = qx_alloc_live();
    int fd = fuzz_file(data, size);
    struct qx_findings *fs = qx_findings_create();
    struct qx_st_header h;
    CHECK(fs && qx_st_header_read(&h, fd, size, "f", 1 << 20, fs, NULL) == 0);
    size_t errors = qx_findings_count_severity(fs, QX_ERROR);
    CHECK(errors == qx_findings_count(fs));
    CHECK(h.state == QX_FILE_OK || errors);
    CHECK(h.state != QX_FILE_BAD || h.n_tensors == 0);
    if (h.state != QX_FILE_BAD) {
        check_tensors(&h, size, errors == 0);
        if (errors == 0 && h.n_tensors < 200) {
            check_again(&h, size - h.data_off);
        }
    }
    qx_st_header_fini(&h);
    qx_findings_destroy(fs);
    CHECK(qx_alloc_live() == live);
    return 0;
}
