/* A shard index. What is accepted is sorted, names each tensor once, knows which names leave the
 * directory, and prints and parses back to the same. */
#include "fuzz.h"

#include "file_map.h"
#include "index_json.h"
#include "json_out.h"
#include "name_sort.h"

static bool has_nul(const struct qx_index *x)
{
    for (size_t i = 0; i < x->n_entries; i++) {
        if (strlen(x->entries[i].name) != x->entries[i].name_len) {
            return true;
        }
    }
    return false;
}

static void check_again(const struct qx_index *x)
{
    struct qx_json_out o;
    struct qx_index again;
    struct qx_findings *fs = qx_findings_create();
    qx_json_out_init(&o, true);
    qx_json_obj(&o, NULL);
    if (x->has_total) {
        qx_json_obj(&o, "metadata");
        qx_json_u64(&o, "total_size", x->total_size);
        qx_json_obj_end(&o);
    }
    qx_json_obj(&o, "weight_map");
    for (size_t i = x->n_entries; i-- > 0;) { /* backwards: order must not matter */
        qx_json_str(&o, x->entries[i].name, x->files[x->entries[i].file].name);
    }
    qx_json_obj_end(&o);
    qx_json_obj_end(&o);
    CHECK(!o.buf.failed && fs && qx_index_parse(&again, o.buf.p, o.buf.n, "again", fs, NULL) == 0);
    CHECK(again.usable && again.n_entries == x->n_entries);
    CHECK(again.has_total == x->has_total && again.total_size == x->total_size);
    for (size_t i = 0; i < x->n_entries; i++) {
        const struct qx_index_entry *a = &x->entries[i], *b = &again.entries[i];
        CHECK(strcmp(a->name, b->name) == 0);
        CHECK(strcmp(x->files[a->file].name, again.files[b->file].name) == 0);
    }
    qx_index_fini(&again);
    qx_findings_destroy(fs);
    qx_json_out_fini(&o);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = qx_alloc_live();
    char *text = fuzz_copy(data, size);
    struct qx_findings *fs = qx_findings_create();
    struct qx_index x;
    CHECK(fs && qx_index_parse(&x, text, size, "index", fs, NULL) == 0);
    free(text); /* nothing may point into it */
    CHECK(x.usable || (qx_findings_count_severity(fs, QX_ERROR) && x.n_entries == 0));
    uint64_t placed = 0;
    for (size_t i = 0; i < x.n_entries; i++) {
        const struct qx_index_entry *e = &x.entries[i];
        CHECK(e->file < x.n_files);
        CHECK(i == 0 || qx_name_compare(e[-1].name, e[-1].name_len, e->name, e->name_len) < 0);
    }
    for (size_t i = 0; i < x.n_files; i++) {
        const char *name = x.files[i].name;
        CHECK(x.files[i].unsafe || qx_name_stays_inside(name, strlen(name)));
        CHECK(i == 0 || strcmp(x.files[i - 1].name, name) <= 0);
        placed += x.files[i].n_tensors;
    }
    CHECK(placed == x.n_entries);
    if (x.usable && !has_nul(&x)) {
        check_again(&x);
    }
    qx_index_fini(&x);
    qx_findings_destroy(fs);
    CHECK(qx_alloc_live() == live);
    return 0;
}
