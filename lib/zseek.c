/* zseek.c: see zseek.h. The seek table is a skippable frame: per frame its size, its content's size
 * and the low half of the content's XXH64, then the number of frames, a flag byte and a magic
 * number. */
#include "zseek.h"

#include "alloc.h"
#include "file_map.h"

#include <inttypes.h>
#include <string.h>
#include <xxhash.h>
#include <zstd.h>

#define SKIPPABLE_MAGIC 0x184D2A5Eu
#define SEEK_MAGIC 0x8F92EAB1u
#define FRAME_MAGIC 0xFD2FB528u
#define FOOTER_BYTES 9u
#define BLOCK_BYTES (128u * 1024)
#define LEVEL 3
/* A frame is tried on a sample first; one that would not shrink by this part is stored. */
#define SAMPLE_BYTES (64u * 1024)
#define WORTH(raw, packed) ((packed) < (raw) - (raw) / 32)

struct qx_zseek_packer {
    ZSTD_CCtx *ctx;
    uint8_t *sample;
};

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) {
        p[i] = (uint8_t)(v >> (8 * i));
    }
}

static uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

struct qx_zseek_packer *qx_zseek_packer_create(void)
{
    struct qx_zseek_packer *p = qx_calloc(1, sizeof *p);
    if (p != NULL) {
        p->ctx = ZSTD_createCCtx();
        p->sample = qx_malloc(ZSTD_compressBound(SAMPLE_BYTES));
    }
    if (p != NULL && (p->ctx == NULL || p->sample == NULL)) {
        qx_zseek_packer_destroy(p);
        p = NULL;
    }
    return p;
}

void qx_zseek_packer_destroy(struct qx_zseek_packer *p)
{
    if (p != NULL) {
        ZSTD_freeCCtx(p->ctx);
        qx_free(p->sample);
        qx_free(p);
    }
}

static size_t raw_bytes(size_t n)
{
    return 9 + n + 3 * (n / BLOCK_BYTES + 1);
}

size_t qx_zseek_bound(size_t n)
{
    size_t a = ZSTD_compressBound(n), b = raw_bytes(n);
    return a > b ? a : b;
}

/* A frame of raw blocks: magic, descriptor (single segment, four bytes of content size), blocks. */
static size_t raw_frame(const uint8_t *src, size_t n, uint8_t *dst)
{
    size_t at = 9;
    put32(dst, FRAME_MAGIC);
    dst[4] = 0xa0;
    put32(dst + 5, (uint32_t)n);
    do {
        size_t k = n < BLOCK_BYTES ? n : BLOCK_BYTES;
        uint32_t head = (uint32_t)(k << 3) | (k == n);
        dst[at] = (uint8_t)head;
        dst[at + 1] = (uint8_t)(head >> 8);
        dst[at + 2] = (uint8_t)(head >> 16);
        memcpy(dst + at + 3, src, k);
        at += 3 + k;
        src += k;
        n -= k;
    } while (n > 0);
    return at;
}

uint32_t qx_zseek_checksum(const void *src, size_t n)
{
    return (uint32_t)XXH64(src, n, 0);
}

int qx_zseek_pack(struct qx_zseek_packer *p, const void *src, size_t n, void *dst, size_t *size,
                  uint32_t *checksum, struct qx_error *err)
{
    *checksum = qx_zseek_checksum(src, n);
    bool worth = true;
    if (n >= 4 * SAMPLE_BYTES) {
        /* The middle of the piece stands for it. */
        size_t k = ZSTD_compressCCtx(p->ctx, p->sample, ZSTD_compressBound(SAMPLE_BYTES),
                                     (const uint8_t *)src + n / 2, SAMPLE_BYTES, LEVEL);
        worth = ZSTD_isError(k) || WORTH(SAMPLE_BYTES, k);
    }
    size_t k = 0;
    if (worth) {
        k = ZSTD_compressCCtx(p->ctx, dst, qx_zseek_bound(n), src, n, LEVEL);
        if (ZSTD_isError(k)) {
            return qx_fail(err, QX_E_NOMEM, "compress", "zstd: %s", ZSTD_getErrorName(k));
        }
    }
    *size = worth && k < raw_bytes(n) ? k : raw_frame(src, n, dst);
    return 0;
}

void qx_zseek_put_table(struct qx_buf *b, const struct qx_zseek_frame *frames, size_t n)
{
    uint8_t e[12];
    put32(e, SKIPPABLE_MAGIC);
    put32(e + 4, (uint32_t)(12 * n + FOOTER_BYTES));
    qx_buf_add(b, e, 8);
    for (size_t i = 0; i < n; i++) {
        put32(e, frames[i].size);
        put32(e + 4, frames[i].data_size);
        put32(e + 8, frames[i].checksum);
        qx_buf_add(b, e, 12);
    }
    put32(e, (uint32_t)n);
    e[4] = 0x80; /* entries have checksums */
    put32(e + 5, SEEK_MAGIC);
    qx_buf_add(b, e, FOOTER_BYTES);
}

struct qx_zseek {
    int fd;
    char file[256];
    uint64_t content;
    struct qx_zseek_frame *frames;
    size_t n;
    bool checksums;
};

static int read_all(int fd, uint64_t off, void *dst, size_t n, const char *file,
                    struct qx_error *err)
{
    int rc = qx_file_read(fd, dst, n, off, err);
    if (rc != 0) {
        qx_error_at(err, file, NULL, off);
    }
    return rc;
}

static int bad_table(struct qx_error *err, const char *file, const char *why)
{
    int rc = qx_fail(err, QX_E_FORMAT, "seek-table", "%s", why);
    qx_error_at(err, file, NULL, QX_NO_OFF);
    return rc;
}

static int read_table(struct qx_zseek *z, uint64_t size, struct qx_error *err)
{
    uint8_t foot[FOOTER_BYTES], head[8];
    if (size < 8 + FOOTER_BYTES) {
        return bad_table(err, z->file, "too short for a seek table");
    }
    int rc = read_all(z->fd, size - FOOTER_BYTES, foot, FOOTER_BYTES, z->file, err);
    if (rc != 0) {
        return rc;
    }
    if (get32(foot + 5) != SEEK_MAGIC || (foot[4] & 0x7c) != 0) {
        return bad_table(err, z->file, "there is no seek table at the end");
    }
    uint64_t n = get32(foot), entry = (foot[4] & 0x80) != 0 ? 12 : 8,
             bytes = n * entry + FOOTER_BYTES;
    if (bytes + 8 > size) {
        return bad_table(err, z->file, "the seek table names more frames than fit into the file");
    }
    uint64_t begin = size - bytes - 8;
    rc = read_all(z->fd, begin, head, 8, z->file, err);
    if (rc == 0 && (get32(head) != SKIPPABLE_MAGIC || get32(head + 4) != bytes)) {
        return bad_table(err, z->file, "the seek table's own header does not fit");
    }
    uint8_t *raw = rc == 0 ? qx_malloc(n * entry + 1) : NULL;
    z->frames = rc == 0 ? qx_calloc(n + 1, sizeof *z->frames) : NULL;
    z->n = n;
    z->checksums = entry == 12;
    if (rc == 0 && (raw == NULL || z->frames == NULL)) {
        rc = qx_fail_nomem(err);
    }
    rc = rc == 0 ? read_all(z->fd, begin + 8, raw, n * entry, z->file, err) : rc;
    uint64_t off = 0;
    for (uint64_t i = 0; rc == 0 && i < n; i++) {
        struct qx_zseek_frame *f = &z->frames[i];
        const uint8_t *e = raw + i * entry;
        *f = (struct qx_zseek_frame){off, z->content, get32(e), get32(e + 4),
                                     z->checksums ? get32(e + 8) : 0};
        off += f->size;
        z->content += f->data_size;
        if (f->data_size > QX_ZSEEK_MAX_CONTENT || f->size > qx_zseek_bound(QX_ZSEEK_MAX_CONTENT)) {
            rc = bad_table(err, z->file, "a frame is larger than 64 MiB");
        }
    }
    if (rc == 0 && off != begin) {
        rc = bad_table(err, z->file, "the frames of the seek table do not add up to the file");
    }
    qx_free(raw);
    return rc;
}

int qx_zseek_open(struct qx_zseek **out, int fd, uint64_t size_bytes, const char *file,
                  struct qx_error *err)
{
    *out = NULL;
    struct qx_zseek *z = qx_calloc(1, sizeof *z);
    if (z == NULL) {
        return qx_fail_nomem(err);
    }
    z->fd = fd;
    size_t n = strlen(file), k = n < sizeof z->file ? n : sizeof z->file - 1;
    memcpy(z->file, file + n - k, k);
    int rc = read_table(z, size_bytes, err);
    if (rc != 0) {
        qx_zseek_close(z);
        return rc;
    }
    *out = z;
    return 0;
}

void qx_zseek_close(struct qx_zseek *z)
{
    if (z != NULL) {
        qx_free(z->frames);
        qx_free(z);
    }
}

uint64_t qx_zseek_content_bytes(const struct qx_zseek *z)
{
    return z->content;
}

size_t qx_zseek_n_frames(const struct qx_zseek *z)
{
    return z->n;
}

const struct qx_zseek_frame *qx_zseek_frame(const struct qx_zseek *z, size_t i)
{
    return &z->frames[i];
}

int qx_zseek_read_frame(const struct qx_zseek *z, size_t i, void *dst, struct qx_error *err)
{
    const struct qx_zseek_frame *f = &z->frames[i];
    uint8_t *packed = qx_malloc((size_t)f->size + 1);
    if (packed == NULL) {
        return qx_fail_nomem(err);
    }
    int rc = read_all(z->fd, f->off, packed, f->size, z->file, err);
    if (rc == 0) {
        size_t n = ZSTD_decompress(dst, f->data_size, packed, f->size);
        if (ZSTD_isError(n) || n != f->data_size) {
            rc = qx_fail(err, QX_E_FORMAT, "zstd-frame", "frame %zu: %s", i,
                         ZSTD_isError(n) ? ZSTD_getErrorName(n)
                                         : "content is shorter than the table says");
        } else if (z->checksums && qx_zseek_checksum(dst, n) != f->checksum) {
            rc = qx_fail(err, QX_E_FORMAT, "checksum",
                         "frame %zu: content differs from its checksum", i);
        }
        qx_error_at(rc != 0 ? err : NULL, z->file, NULL, f->off);
    }
    qx_free(packed);
    return rc;
}

int qx_zseek_read(const struct qx_zseek *z, uint64_t off, void *dst, size_t n, struct qx_error *err)
{
    uint64_t end;
    if (!qx_add_u64(off, n, &end) || end > z->content) {
        return qx_fail(err, QX_E_FORMAT, "truncated",
                       "bytes %" PRIu64 " to %" PRIu64 " of %" PRIu64, off, off + n, z->content);
    }
    /* The last frame that begins at or before `off`. */
    size_t lo = 0, hi = z->n;
    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        *(z->frames[mid].data_off <= off ? &lo : &hi) = mid;
    }
    /* Frames that should be empty and lie at an edge of the range are read too: their content may not be. */
    while (lo > 0 && z->frames[lo - 1].data_off == off) {
        --lo;
    }
    uint8_t *buf = NULL, *p = dst;
    size_t cap = 0;
    int rc = 0;
    for (size_t i = lo; rc == 0 && i < z->n; i++) {
        const struct qx_zseek_frame *f = &z->frames[i];
        if (n == 0 && f->data_size > 0) {
            break;
        }
        uint64_t skip = off - f->data_off;
        if (f->data_size == 0) {
            uint8_t none;
            rc = qx_zseek_read_frame(z, i, &none, err);
            continue;
        }
        size_t k = f->data_size - skip < n ? (size_t)(f->data_size - skip) : n;
        if (skip == 0 && k == f->data_size) {
            rc = qx_zseek_read_frame(z, i, p, err);
        } else if (!qx_grow((void **)&buf, &cap, f->data_size, 1)) {
            rc = qx_fail_nomem(err);
        } else if ((rc = qx_zseek_read_frame(z, i, buf, err)) == 0) {
            memcpy(p, buf + skip, k);
        }
        p += k;
        off += k;
        n -= k;
    }
    qx_free(buf);
    return rc;
}
