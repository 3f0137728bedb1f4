/* pack.c: see pack.h. The text form is parsed as strictly as it is printed: all keys, in order. */
#include "pack.h"

#include "num.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

bool qx_table_row_bytes(enum qx_format f, uint32_t width, uint32_t *code_bytes,
                        uint32_t *scale_bytes)
{
    uint64_t codes = width, scales = 0;
    switch (f) {
    case QX_F_BF16:
    case QX_F_F16:
        codes = 2 * (uint64_t)width;
        break;
    case QX_F_F32:
        codes = 4 * (uint64_t)width;
        break;
    case QX_F_FP8:
        break;
    case QX_F_NVFP4:
    case QX_F_W4A16_NVFP4:
        if (width % 16 != 0) {
            return false;
        }
        codes = width / 2;
        scales = width / 16;
        break;
    default:
        return false;
    }
    if (width == 0 || codes > UINT32_MAX) {
        return false;
    }
    *code_bytes = (uint32_t)codes;
    *scale_bytes = (uint32_t)scales;
    return true;
}

bool qx_pack_layout(struct qx_pack_info *p)
{
    if (p->n_rows == 0 ||
        !qx_table_row_bytes(p->format, p->width, &p->code_bytes, &p->scale_bytes)) {
        return false;
    }
    uint64_t row = (uint64_t)p->code_bytes + p->scale_bytes, per;
    p->block_bytes = QX_PACK_BLOCK_BYTES;
    per = p->block_bytes / row;
    if (per == 0) {
        return false;
    }
    p->rows_per_block = (uint32_t)per;
    p->n_blocks = qx_ceil_div(p->n_rows, per);
    return p->n_blocks <= UINT64_MAX / p->block_bytes;
}

static const char *format_word(enum qx_format f)
{
    return f == QX_F_W4A16_NVFP4 ? "NVFP4" : qx_format_name(f);
}

void qx_pack_print(const struct qx_pack_info *p, char out[320])
{
    int n = snprintf(out, 320,
                     "%u format=%s width=%" PRIu32 " rows=%" PRIu64 " row_base=%" PRIu64
                     " block_bytes=%" PRIu32 " rows_per_block=%" PRIu32 " global=",
                     QX_PACK_VERSION, format_word(p->format), p->width, p->n_rows, p->row_base,
                     p->block_bytes, p->rows_per_block);
    size_t at = n < 0 ? 0 : (size_t)n;
    at += (size_t)(p->has_global ? snprintf(out + at, 320 - at, "%08" PRIx32, p->global_bits)
                                 : snprintf(out + at, 320 - at, "none"));
    at += (size_t)snprintf(out + at, 320 - at, " xxh3=");
    for (size_t i = 0; i < 16; i++) {
        at += (size_t)snprintf(out + at, 320 - at, "%02x", p->has_hash ? p->xxh3[i] : 0);
    }
}

static int bad(struct qx_error *err, const char *key, const char *value)
{
    return qx_fail(err, QX_E_FORMAT, "pack-header",
                   "the header of the packed table has '%s' = '%.60s'", key, value);
}

/* Value of the next "key=value" word; advances *s. */
static bool word(const char **s, const char *key, char out[64])
{
    size_t k = strlen(key);
    if (**s != ' ' || strncmp(*s + 1, key, k) != 0 || (*s)[1 + k] != '=') {
        return false;
    }
    const char *v = *s + 2 + k;
    size_t n = strcspn(v, " ");
    if (n == 0 || n >= 64) {
        return false;
    }
    memcpy(out, v, n);
    out[n] = 0;
    *s = v + n;
    return true;
}

static bool hex_digits(const char *s, size_t n, uint8_t *out)
{
    for (size_t i = 0; i < n; i++) {
        const char *digits = "0123456789abcdef", *d = s[i] ? strchr(digits, s[i]) : NULL;
        if (d == NULL) {
            return false;
        }
        uint8_t v = (uint8_t)(d - digits);
        out[i / 2] = (uint8_t)(i % 2 == 0 ? v << 4 : out[i / 2] | v);
    }
    return s[n] == 0;
}

int qx_pack_parse(struct qx_pack_info *out, const char *text, struct qx_error *err)
{
    struct qx_pack_info p = {0};
    char v[64];
    const char *s = text + strcspn(text, " ");
    if (s - text != 1 || text[0] != '0' + (char)QX_PACK_VERSION) {
        return bad(err, "version", text);
    }
    if (!word(&s, "format", v)) {
        return bad(err, "format", s);
    }
    for (int f = QX_F_NONE + 1; f < QX_F_COUNT; f++) {
        if (strcmp(v, qx_format_name((enum qx_format)f)) == 0) {
            p.format = (enum qx_format)f;
        }
    }
    static const char *const keys[] = {"width", "rows", "row_base", "block_bytes",
                                       "rows_per_block"};
    uint64_t n[5];
    for (size_t i = 0; i < 5; i++) {
        if (!word(&s, keys[i], v) || !qx_parse_u64(v, strlen(v), &n[i])) {
            return bad(err, keys[i], s);
        }
    }
    if (n[0] == 0 || n[0] > UINT32_MAX) {
        return bad(err, "width", "out of range");
    }
    p.width = (uint32_t)n[0];
    p.n_rows = n[1];
    p.row_base = n[2];
    if (!qx_pack_layout(&p)) {
        return bad(err, "format", text);
    }
    if (n[3] != p.block_bytes || n[4] != p.rows_per_block) {
        return bad(err, n[3] != p.block_bytes ? "block_bytes" : "rows_per_block", text);
    }
    uint8_t g[4];
    if (!word(&s, "global", v)) {
        return bad(err, "global", s);
    }
    p.has_global = strcmp(v, "none") != 0;
    if (p.has_global) {
        if (strlen(v) != 8 || !hex_digits(v, 8, g)) {
            return bad(err, "global", v);
        }
        p.global_bits = (uint32_t)g[0] << 24 | (uint32_t)g[1] << 16 | (uint32_t)g[2] << 8 | g[3];
    }
    if (p.has_global != (p.format == QX_F_FP8 || p.format == QX_F_NVFP4)) {
        return bad(err, "global", v);
    }
    if (!word(&s, "xxh3", v) || strlen(v) != 32 || !hex_digits(v, 32, p.xxh3) || *s != 0) {
        return bad(err, "xxh3", s);
    }
    p.has_hash = true;
    *out = p;
    return 0;
}

int qx_pack_read(struct qx_pack_info *out, const struct qx_ckpt *ck, const struct qx_tensor *t,
                 struct qx_error *err)
{
    const struct qx_file *f = qx_ckpt_file(ck, t->file);
    const char *text = NULL;
    for (uint32_t i = 0; i < f->n_meta; i++) {
        if (strcmp(f->meta[i].key, QX_PACK_KEY) == 0) {
            text = f->meta[i].value;
        }
    }
    struct qx_pack_info p;
    int rc;
    if (text == NULL) {
        rc = qx_fail(err, QX_E_FORMAT, "pack-header",
                     "the file of the packed table has no '%s' in its "
                     "metadata",
                     QX_PACK_KEY);
        qx_error_at(err, f->name, t->name, QX_NO_OFF);
        return rc;
    }
    rc = qx_pack_parse(&p, text, err);
    if (rc == 0 && (t->dtype != QX_DT_U8 || t->n_dims != 2 || t->shape[0] != p.n_blocks ||
                    t->shape[1] != p.block_bytes)) {
        rc = qx_fail(err, QX_E_FORMAT, "pack-shape",
                     "the packed table is stored as %s, expected U8 "
                     "[%" PRIu64 ", %" PRIu32 "]",
                     qx_dtype_name((enum qx_dtype)t->dtype), p.n_blocks, p.block_bytes);
    }
    if (rc == 0 && t->off % p.block_bytes != 0) {
        rc = qx_fail(err, QX_E_FORMAT, "pack-shape",
                     "the packed table begins at byte %" PRIu64 ", not "
                     "at a multiple of %" PRIu32,
                     t->off, p.block_bytes);
    }
    if (rc != 0) {
        qx_error_at(err, f->name, t->name, QX_NO_OFF);
        return rc;
    }
    *out = p;
    return 0;
}
