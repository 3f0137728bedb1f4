/* version.h: what --version prints. */
#ifndef QX_CMD_VERSION_H
#define QX_CMD_VERSION_H

#include "str.h"

/* Appends version, commit, build options and versions of the libraries, a line each. */
void version_text(struct qx_buf *b, const char *program);

#endif
