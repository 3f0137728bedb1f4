/* dtype.c: owns the tables of element types and of format names. */
#include "dtype.h"

#include "base.h"

#include <string.h>

static const struct { const char *name; uint32_t size_bytes; } dtypes[QX_DT_COUNT] = {
    [QX_DT_UNKNOWN] = {"unknown", 0},
    [QX_DT_BOOL] = {"BOOL", 1},
    [QX_DT_U8] = {"U8", 1},
    [QX_DT_I8] = {"I8", 1},
    [QX_DT_F8_E4M3] = {"F8_E4M3", 1},
    [QX_DT_F8_E5M2] = {"F8_E5M2", 1},
    [QX_DT_F8_E8M0] = {"F8_E8M0", 1},
    [QX_DT_I16] = {"I16", 2},
    [QX_DT_U16] = {"U16", 2},
    [QX_DT_F16] = {"F16", 2},
    [QX_DT_BF16] = {"BF16", 2},
    [QX_DT_I32] = {"I32", 4},
    [QX_DT_U32] = {"U32", 4},
    [QX_DT_F32] = {"F32", 4},
    [QX_DT_I64] = {"I64", 8},
    [QX_DT_U64] = {"U64", 8},
    [QX_DT_F64] = {"F64", 8},
    [QX_DT_C64] = {"C64", 8},
};

static const char *const formats[QX_F_COUNT] = {
    [QX_F_NONE] = "none",
    [QX_F_BF16] = "BF16",
    [QX_F_F16] = "F16",
    [QX_F_F32] = "F32",
    [QX_F_I64] = "I64",
    [QX_F_FP8] = "FP8",
    [QX_F_FP8_BLOCK] = "FP8_BLOCK",
    [QX_F_MXFP8] = "MXFP8",
    [QX_F_NVFP4] = "NVFP4",
    [QX_F_W4A16_NVFP4] = "W4A16_NVFP4",
    [QX_F_MIXED] = "mixed",
};

const char *qx_dtype_name(enum qx_dtype t)
{
    return (unsigned)t < QX_DT_COUNT ? dtypes[t].name : dtypes[QX_DT_UNKNOWN].name;
}

uint32_t qx_dtype_size(enum qx_dtype t)
{
    return (unsigned)t < QX_DT_COUNT ? dtypes[t].size_bytes : 0;
}

enum qx_dtype qx_dtype_from_text(const char *s, size_t n)
{
    for (int t = QX_DT_UNKNOWN + 1; t < QX_DT_COUNT; t++) {
        if (strlen(dtypes[t].name) == n && memcmp(dtypes[t].name, s, n) == 0) {
            return (enum qx_dtype)t;
        }
    }
    return QX_DT_UNKNOWN;
}

const char *qx_format_name(enum qx_format f)
{
    return (unsigned)f < QX_F_COUNT ? formats[f] : formats[QX_F_NONE];
}
