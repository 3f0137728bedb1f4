/* inspect_json.c: qx.inspect/1, as qx-json(5) describes it. */
#include "inspect.h"

#include "str.h"

#include <string.h>

static void count_or_null(struct qx_json_out *o, const char *key, bool known, uint64_t v)
{
    if (known) {
        qx_json_u64(o, key, v);
    } else {
        qx_json_null(o, key);
    }
}

static void put_model(struct qx_json_out *o, const struct qx_inspection *in)
{
    qx_json_obj(o, "model");
    qx_json_str(o, "type", in->type);
    qx_json_str(o, "type_found", in->type_found);
    qx_json_str(o, "architecture", in->architecture);
    qx_json_str(o, "layout", in->layout);
    count_or_null(o, "layers", in->has_config, in->n_layers);
    count_or_null(o, "hidden_size", in->has_config, in->hidden_size);
    count_or_null(o, "experts", in->has_config, in->n_experts);
    count_or_null(o, "vocab_size", in->has_config, in->vocab_size);
    count_or_null(o, "linear_attention_layers", in->has_config, in->n_linear_layers);
    count_or_null(o, "full_attention_layers", in->has_config, in->n_full_layers);
    qx_json_obj_end(o);
}

static void put_files(struct qx_json_out *o, const struct inspect_job *j)
{
    qx_json_arr(o, "files");
    for (size_t i = 0; i < qx_ckpt_n_files(j->ck); i++) {
        const struct qx_file *f = qx_ckpt_file(j->ck, i);
        bool known = f->state == QX_FILE_OK || f->state == QX_FILE_SHORT;
        if (f->state == QX_FILE_REFUSED) {
            continue; /* outside the directory: no file of this checkpoint; a finding names it */
        }
        qx_json_obj(o, NULL);
        qx_json_str(o, "name", f->name);
        qx_json_u64(o, "bytes", f->size_bytes);
        count_or_null(o, "header_bytes", known, f->header_bytes);
        count_or_null(o, "tensors", known, f->n_tensors);
        if (j->ui.verbose && known) {
            if (f->has_metadata) {
                qx_json_obj(o, "metadata");
                for (uint32_t k = 0; k < f->n_meta; k++) {
                    qx_json_str(o, f->meta[k].key, f->meta[k].value);
                }
                qx_json_obj_end(o);
            } else {
                qx_json_null(o, "metadata");
            }
        }
        qx_json_obj_end(o);
    }
    qx_json_arr_end(o);
}

static void put_tensors(struct qx_json_out *o, const struct qx_inspection *in)
{
    qx_json_obj(o, "tensors");
    qx_json_u64(o, "count", in->n_tensors);
    qx_json_u64(o, "payload_bytes", in->payload_bytes);
    qx_json_u64(o, "parameters", in->n_params);
    qx_json_obj(o, "by_dtype");
    for (size_t i = 0; i < in->n_dtypes; i++) {
        qx_json_obj(o, in->dtypes[i].dtype);
        qx_json_u64(o, "tensors", in->dtypes[i].n_tensors);
        qx_json_u64(o, "bytes", in->dtypes[i].size_bytes);
        qx_json_obj_end(o);
    }
    qx_json_obj_end(o);
    qx_json_obj_end(o);
    qx_json_arr(o, "components");
    for (size_t i = 0; i < in->n_components; i++) {
        const struct qx_component_total *c = &in->components[i];
        qx_json_obj(o, NULL);
        qx_json_str(o, "name", c->name);
        qx_json_u64(o, "tensors", c->n_tensors);
        qx_json_u64(o, "bytes", c->size_bytes);
        qx_json_u64(o, "parameters", c->n_params);
        qx_json_str(o, "format", c->format);
        qx_json_str(o, "source", c->source);
        qx_json_obj_end(o);
    }
    qx_json_arr_end(o);
}

static void put_quantization(struct qx_json_out *o, const struct qx_inspection *in)
{
    if (!in->has_config || in->planned) {
        qx_json_null(o, "quantization");
        return;
    }
    qx_json_obj(o, "quantization");
    qx_json_str(o, "method", in->quant_method);
    qx_json_str(o, "algo", in->quant_algo);
    qx_json_str(o, "kv_cache_algo", in->kv_cache_algo);
    qx_json_str(o, "source", in->quant_file);
    qx_json_arr(o, "modules");
    for (size_t i = 0; i < in->n_modules; i++) {
        const struct qx_module_info *m = &in->modules[i];
        qx_json_obj(o, NULL);
        qx_json_str(o, "module", m->module);
        qx_json_str(o, "format", m->format);
        count_or_null(o, "group_size", m->group_size != 0, m->group_size);
        qx_json_str(o, "source", m->source);
        qx_json_str(o, "entry", m->entry);
        qx_json_obj_end(o);
    }
    qx_json_arr_end(o);
    qx_json_obj_end(o);
}

static void put_list(struct qx_json_out *o, const char *key, const uint64_t *v, uint32_t n)
{
    qx_json_arr(o, key);
    for (uint32_t i = 0; i < n; i++) {
        qx_json_u64(o, NULL, v[i]);
    }
    qx_json_arr_end(o);
}

static void put_ple(struct qx_json_out *o, const struct qx_inspection *in)
{
    const struct qx_ple_info *p = &in->ple;
    if (!p->present) {
        qx_json_null(o, "ple");
        return;
    }
    qx_json_obj(o, "ple");
    qx_json_u64(o, "layer_index", p->layer_index);
    qx_json_u64(o, "rows", p->n_rows);
    qx_json_u64(o, "rows_used", p->n_rows_used);
    qx_json_u64(o, "row_width", p->row_width);
    qx_json_str(o, "form", p->form);
    count_or_null(o, "shards", p->n_shards != 0, p->n_shards);
    count_or_null(o, "bytes", p->size_bytes != 0, p->size_bytes);
    if (p->has_scale) {
        qx_json_f64(o, "scale", p->scale);
    } else {
        qx_json_null(o, "scale");
    }
    qx_json_str(o, "scale_dtype", p->scale_dtype);
    put_list(o, "head_sizes", p->head_sizes, p->n_heads);
    put_list(o, "multipliers", p->multipliers, p->ngram_size);
    qx_json_obj_end(o);
}

static void put_fit(struct qx_json_out *o, const struct qx_fit *f)
{
    if (!f) {
        qx_json_null(o, "fit");
        return;
    }
    qx_json_obj(o, "fit");
    qx_json_u64(o, "device_bytes", f->device_bytes);
    qx_json_u64(o, "needed_bytes", f->needed_bytes);
    qx_json_u64(o, "host_bytes", f->host_bytes);
    qx_json_bool(o, "fits", f->fits);
    qx_json_u64(o, "ctx", f->ctx_tokens);
    qx_json_arr(o, "parts");
    for (uint32_t i = 0; i < f->n_parts; i++) {
        qx_json_obj(o, NULL);
        qx_json_str(o, "name", f->parts[i].name);
        qx_json_u64(o, "bytes", f->parts[i].size_bytes);
        qx_json_str(o, "place", f->parts[i].place);
        qx_json_obj_end(o);
    }
    qx_json_arr_end(o);
    qx_json_str(o, "advice", f->advice[0] ? f->advice : NULL);
    qx_json_obj_end(o);
}

static void put_tensor(struct qx_json_out *o, const struct inspect_job *j,
                       const struct qx_tensor *t)
{
    const struct qx_file *f = qx_ckpt_file(j->ck, t->file);
    qx_json_strn(o, "name", t->name, t->name_len);
    qx_json_str(o, "dtype", qx_dtype_name((enum qx_dtype)t->dtype));
    qx_json_arr(o, "shape");
    for (unsigned i = 0; i < t->n_dims; i++) {
        qx_json_u64(o, NULL, t->shape[i]);
    }
    qx_json_arr_end(o);
    qx_json_u64(o, "bytes", t->size_bytes);
    qx_json_u64(o, "offset", t->off);
    qx_json_str(o, "file", f->name);
    qx_json_bool(o, "readable", t->readable);
}

/* What was asked for beside the summary. */
static void put_asked(struct qx_json_out *o, const struct inspect_job *j)
{
    if (j->tensors_glob) {
        qx_json_arr(o, "tensor_list");
        for (size_t i = 0; i < qx_ckpt_n_tensors(j->ck); i++) {
            const struct qx_tensor *t = qx_ckpt_tensor(j->ck, i);
            if (qx_glob_match(j->tensors_glob, t->name)) {
                qx_json_obj(o, NULL);
                put_tensor(o, j, t);
                qx_json_obj_end(o);
            }
        }
        qx_json_arr_end(o);
    }
    if (j->why) {
        qx_json_arr(o, "why");
        for (const char *p = j->why; *p;) {
            const char *end = strchr(p, '\n');
            size_t n = end ? (size_t)(end - p) : strlen(p);
            qx_json_strn(o, NULL, p, n);
            p += n + (end ? 1 : 0);
        }
        qx_json_arr_end(o);
    }
    if (j->stats) {
        qx_json_arr(o, "stats");
        for (size_t i = 0; i < j->n_stats; i++) {
            const struct qx_value_stats *v = &j->stats[i].v;
            qx_json_obj(o, NULL);
            put_tensor(o, j, j->stats[i].t);
            qx_json_u64(o, "values", v->n);
            qx_json_u64(o, "zeros", v->n_zero);
            qx_json_u64(o, "nan", v->n_nan);
            qx_json_u64(o, "infinite", v->n_inf);
            qx_json_f64(o, "min", v->min);
            qx_json_f64(o, "max", v->max);
            qx_json_f64(o, "mean", v->mean);
            qx_json_f64(o, "rms", v->rms);
            qx_json_f64(o, "bin_lo", v->bin_lo);
            qx_json_f64(o, "bin_hi", v->bin_hi);
            put_list(o, "bins", v->bin, QX_STATS_BINS);
            qx_json_obj_end(o);
        }
        qx_json_arr_end(o);
    }
}

void inspect_print_json(const struct inspect_job *j)
{
    const struct qx_inspection *in = j->in;
    struct qx_json_out o;
    qx_json_out_init(&o, true);
    qx_json_obj(&o, NULL);
    qx_json_str(&o, "schema", "qx.inspect/1");
    qx_json_str(&o, "path", j->path);
    put_model(&o, in);
    put_files(&o, j);
    put_tensors(&o, in);
    put_quantization(&o, in);
    put_ple(&o, in);
    qx_json_obj(&o, "mtp");
    qx_json_bool(&o, "present", in->has_mtp);
    qx_json_str(&o, "format", in->mtp_format);
    qx_json_obj_end(&o);
    qx_json_arr(&o, "remarks");
    for (size_t i = 0; i < in->n_remarks; i++) {
        qx_json_str(&o, NULL, in->remarks[i]);
    }
    qx_json_arr_end(&o);
    qx_json_arr(&o, "warnings");
    for (size_t i = 0; i < qx_findings_count(in->findings); i++) {
        ui_json_finding(&o, NULL, qx_findings_at(in->findings, i));
    }
    qx_json_arr_end(&o);
    put_fit(&o, j->fit);
    put_asked(&o, j);
    qx_json_obj_end(&o);
    qx_buf_chr(&o.buf, '\n');
    if (!o.buf.failed) {
        ui_out(o.buf.p, o.buf.n);
    }
    qx_json_out_fini(&o);
}
