/* ops.c: names of the ops, in the order of ops.def. */
#include "ops.h"

const char *const qx_op_names[QX_OP_COUNT] = {
#define OP(name, bound) #name,
#include "ops.def"
#undef OP
};
