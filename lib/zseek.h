/* zseek.h: zstd files of independent frames with a seek table at the end (the zstd seekable format), which
 * stock zstd -d reads like any other. Frames that do not shrink are stored as raw blocks. */
#ifndef QX_ZSEEK_H
#define QX_ZSEEK_H

#include "base.h"
#include "error.h"
#include "str.h"

#define QX_ZSEEK_FRAME_BYTES (2u << 20) /* content of a frame; the last may be shorter */
#define QX_ZSEEK_MAX_CONTENT (64u << 20) /* larger frames of strangers are refused */

struct qx_zseek_frame { uint64_t off, data_off; uint32_t size, data_size, checksum; };

/* ---- writing ---- */
struct qx_zseek_packer; /* one a thread */
struct qx_zseek_packer *qx_zseek_packer_create(void);
void qx_zseek_packer_destroy(struct qx_zseek_packer *p);
size_t qx_zseek_bound(size_t n); /* room for the frame of n bytes */
/* One frame of n <= QX_ZSEEK_MAX_CONTENT bytes to dst; *size, *checksum are for its entry. */
int qx_zseek_pack(struct qx_zseek_packer *p, const void *src, size_t n, void *dst, size_t *size,
                  uint32_t *checksum, struct qx_error *err);
uint32_t qx_zseek_checksum(const void *src, size_t n); /* of content, as in its entry */
/* Appends the seek table of n frames. */
void qx_zseek_put_table(struct qx_buf *b, const struct qx_zseek_frame *frames, size_t n);

/* ---- reading ---- */
struct qx_zseek;
/* Reads the seek table at the end of fd, which stays the caller's. Kind "seek-table" (QX_E_FORMAT) when
 * there is none or its sums do not fit the file. */
int qx_zseek_open(struct qx_zseek **out, int fd, uint64_t size_bytes, const char *file,
                  struct qx_error *err);
void qx_zseek_close(struct qx_zseek *z);
uint64_t qx_zseek_content_bytes(const struct qx_zseek *z);
size_t qx_zseek_n_frames(const struct qx_zseek *z);
const struct qx_zseek_frame *qx_zseek_frame(const struct qx_zseek *z, size_t i);
/* The content of frame i, data_size bytes, into dst; checked against its checksum ("zstd-frame",
 * "checksum"). Safe from many threads. */
int qx_zseek_read_frame(const struct qx_zseek *z, size_t i, void *dst, struct qx_error *err);
/* Any range of the content. */
int qx_zseek_read(const struct qx_zseek *z, uint64_t off, void *dst, size_t n, struct qx_error *err);

#endif
