/* hub.h: the checksums that a download from the Hugging Face hub leaves beside a checkpoint. */
#ifndef QX_HUB_H
#define QX_HUB_H

#include "error.h"
#include "qx.h"
#include "str.h"

/* Appends a checksum list (qx-manifest(5)) of the files of ck's directory for which the hub's checksum is
 * known. None: QX_E_NOT_FOUND "hub-checksums". */
int qx_hub_list(const struct qx_ckpt *ck, struct qx_buf *b, struct qx_error *err);

#endif
