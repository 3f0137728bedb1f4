/* demo_opts.h: the options of a command that does nothing, one of every type, for tests of the option
 * engine. */
#ifndef QX_TEST_DEMO_OPTS_H
#define QX_TEST_DEMO_OPTS_H

#include "opt.h"

static struct values {
    bool flag, given;
    unsigned count;
    const char *str, *choice, *optstr;
    uint64_t u64, size;
    double f64;
    struct qx_u64_list list;
    struct opt_strs strs;
    struct opt_common common;
} v;
static const char *const words[] = {"red", "green", NULL};
static const struct opt opts[] = {
    {OPT_GROUP, .help = "Some"},
    {OPT_FLAG, 'f', "flag", 0, &v.flag, &v.given, "a flag"},
    {OPT_COUNT, 'c', "count", 0, &v.count, 0, "a count"},
    {OPT_STR, 's', "string", "TEXT", &v.str, 0, "a string"},
    {OPT_CHOICE, 0, "colour", "WORD", &v.choice, 0, "a choice", words},
    {OPT_OPTSTR, 't', "tensors", "GLOB", &v.optstr, 0, "optional"},
    {OPT_U64, 'n', "number", "N", &v.u64, 0, "a number"},
    {OPT_SIZE, 0, "size", "SIZE", &v.size, 0, "a size"},
    {OPT_F64, 0, "ratio", "X", &v.f64, 0, "a ratio"},
    {OPT_LIST, 0, "rows", "LIST", &v.list, 0, "rows", .kind = "row-range"},
    {OPT_STRS, 0, "many", "TEXT", &v.strs, 0, "many"},
    OPT_COMMON(v.common),
    {.type = OPT_END},
};

#endif
