/* dtype.h: element types by their header text. Names and sizes are public (qx.h). */
#ifndef QX_DTYPE_H
#define QX_DTYPE_H

#include "qx.h"

/* QX_DT_UNKNOWN when no type has this name. Case matters, as in the format. */
enum qx_dtype qx_dtype_from_text(const char *s, size_t n);

#endif
