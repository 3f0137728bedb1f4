/* The option engine, progress and tables of the command layer, with stdout and stderr in files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../demo_opts.h"
#include "progress.h"
#include "str.h"
#include "table.h"
#include "ui.h"

static const struct opt_command cmd = {"demo", "qx-demo [OPTION]... PATH\n", "Shows.", "  qx demo x\n",
                                       opts, 0, 2};

static char captured[2][65536];
static int saved[2];

static void capture_begin(void)
{
    for (int i = 0; i < 2; i++) {
        FILE *f = i ? stderr : stdout;
        fflush(f);
        saved[i] = dup(fileno(f));
        FILE *t = tmpfile();
        assert_non_null(t);
        dup2(fileno(t), fileno(f));
        fclose(t);
    }
}

static void capture_end(void)
{
    for (int i = 0; i < 2; i++) {
        FILE *f = i ? stderr : stdout;
        fflush(f);
        lseek(fileno(f), 0, SEEK_SET);
        ssize_t n = read(fileno(f), captured[i], sizeof captured[i] - 1);
        captured[i][n > 0 ? n : 0] = '\0';
        dup2(saved[i], fileno(f));
        close(saved[i]);
    }
}

/* Parses a line of words; the arguments come back joined by '|'. */
static int parse(const char *line, char *args_out)
{
    static char buf[4096];
    char *argv[64] = {(char *)"qx-demo"}, **args;
    int argc = 1, n = 0;
    snprintf(buf, sizeof buf, "%s", line);
    for (char *p = strtok(buf, " "); p; p = strtok(NULL, " ")) {
        argv[argc++] = p;
    }
    qx_u64_list_fini(&v.list);
    memset(&v, 0, sizeof v);
    capture_begin();
    int rc = opt_parse(&cmd, argc, argv, &args, &n);
    capture_end();
    args_out[0] = '\0';
    for (int i = 0; rc == -1 && i < n; i++) {
        strcat(args_out, i ? "|" : "");
        strcat(args_out, args[i]);
    }
    return rc;
}

static void good_lines(void **state)
{
    char a[4096];
    (void)state;
    assert_int_equal(parse("x -fcc -s t y --number=7 --size 2KiB --ratio 0.5 --rows 3-5,1 --many a --many b",
                           a), -1);
    assert_string_equal(a, "x|y");
    assert_true(v.flag && v.given);
    assert_int_equal(v.count, 2);
    assert_string_equal(v.str, "t");
    assert_int_equal(v.u64, 7);
    assert_int_equal(v.size, 2048);
    assert_true(v.f64 == 0.5);
    assert_int_equal(v.list.n, 4);
    assert_int_equal(v.list.v[0], 3);
    assert_int_equal(v.list.v[3], 1);
    assert_int_equal(v.strs.n, 2);
    assert_int_equal(parse("-f --no-flag -n5 --colour green -- -x", a), -1);
    assert_string_equal(a, "-x");
    assert_false(v.flag);
    assert_int_equal(v.u64, 5);
    assert_string_equal(v.choice, "green");
    assert_int_equal(parse("--tensors x", a), -1);
    assert_string_equal(v.optstr, "");
    assert_string_equal(a, "x");
    assert_int_equal(parse("--tensors=*.weight -", a), -1);
    assert_string_equal(v.optstr, "*.weight");
    assert_string_equal(a, "-");
    assert_int_equal(parse("--string=--json", a), -1);
    assert_string_equal(v.str, "--json");
    assert_int_equal(parse("-s -f", a), -1);
    assert_string_equal(v.str, "-f");
}

static void environment(void **state)
{
    char a[4096];
    (void)state;
    setenv("QX_THREADS", "3", 1);
    assert_int_equal(parse("x", a), -1);
    assert_int_equal(v.common.threads, 3);
    assert_int_equal(parse("x -j 5", a), -1);
    assert_int_equal(v.common.threads, 5);
    setenv("QX_THREADS", "many", 1);
    assert_int_equal(parse("x", a), 2);
    assert_non_null(strstr(captured[1], "QX_THREADS"));
    unsetenv("QX_THREADS");
}

static void wrong_lines(void **state)
{
    static const struct { const char *line, *names; } t[] = {
        {"--nothing", "--nothing"},
        {"--flga", "did you mean '--flag'"},
        {"--numb 3", "did you mean '--number'"}, /* no abbreviations */
        {"-x", "-x"},
        {"--number", "--number"},
        {"-n", "-n"},
        {"--string --json", "--string"}, /* a forgotten value */
        {"-s --number=3", "-s"},
        {"--number x", "'x'"},
        {"--number -1", "'-1'"},
        {"--number 99999999999999999999", "99999999999999999999"},
        {"--ratio nan", "nan"},
        {"--size 2MB", "2MiB"},
        {"--colour blue", "red or green"},
        {"--flag=1", "--flag"},
        {"--no-string", "--no-string"},
        {"--no-help", "--no-help"},
        {"--rows 5-x", "5-x"},
        {"--rows -3", "row-range"},
        {"a b c", "'c'"},
        {"--json --nothing", "--nothing"},
        {"--nothing --json", "--nothing"},
    };
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(t); i++) {
        char a[4096];
        if (parse(t[i].line, a) != 2) {
            fail_msg("'%s' is accepted", t[i].line);
        }
        assert_string_equal(captured[0], "");
        if (!strstr(captured[1], t[i].names) || strncmp(captured[1], "qx-demo: ", 9) != 0 ||
            strchr(captured[1], '\n') != captured[1] + strlen(captured[1]) - 1) {
            fail_msg("'%s' says: %s", t[i].line, captured[1]);
        }
    }
}

static void answers(void **state)
{
    static const struct { const char *line, *has, *starts; } t[] = {
        {"-h", "qx demo x", "qx-demo [OPTION]... PATH\n"},
        {"--help", "--colour WORD", "qx-demo [OPTION]... PATH\n"},
        {"--json --help", "--tensors[=GLOB]", "qx-demo"},
        {"--version", "zstd", "qx-demo "},
        {"-V", "utf8proc", "qx-demo "},
        {"--list-options", "--colour\tWORD\tred,green\ta choice\n", "--flag,-f\t\t\ta flag\n"},
    };
    char a[4096];
    (void)state;
    for (size_t i = 0; i < QX_ARRAY_LEN(t); i++) {
        assert_int_equal(parse(t[i].line, a), 0);
        assert_non_null(strstr(captured[0], t[i].has));
        assert_int_equal(strncmp(captured[0], t[i].starts, strlen(t[i].starts)), 0);
        assert_string_equal(captured[1], "");
    }
    /* A list that cannot be read is no usage error: exit 3, with --json an object on stdout. */
    assert_int_equal(parse("--rows @/nonexistent --json", a), 3);
    assert_non_null(strstr(captured[0], "\"qx.error/1\""));
    assert_non_null(strstr(captured[1], "/nonexistent"));
}

static size_t count(const char *s, char c)
{
    size_t n = 0;
    for (; *s; s++) {
        n += *s == c;
    }
    return n;
}

static void work(struct ui *ui, uint64_t step_us)
{
    struct progress p;
    progress_start(&p, ui, "loading", 100 << 20, PROGRESS_BYTES);
    for (uint64_t i = 1; i <= 100; i++) {
        progress_update(&p, i << 20);
        usleep((useconds_t)step_us);
    }
    progress_finish(&p);
}

static void progress_lines(void **state)
{
    struct opt_common c = {0};
    struct ui ui;
    (void)state;
    unsetenv("QX_FAKE_TTY");
    setenv("TERM", "xterm", 1);
    /* off a terminal: nothing */
    capture_begin();
    ui_init(&ui, "t", &c);
    work(&ui, 0);
    capture_end();
    assert_string_equal(captured[1], "");
    /* asked for: plain lines, few, no escape */
    c.progress = "always";
    capture_begin();
    ui_init(&ui, "t", &c);
    for (int i = 0; i < 40; i++) {
        work(&ui, 0);
    }
    capture_end();
    assert_null(strchr(captured[1], '\033'));
    assert_true(count(captured[1], '\n') >= 1 && count(captured[1], '\n') <= PROGRESS_MAX_LINES);
    assert_non_null(strstr(captured[1], "loading 100.00 MiB of 100.00 MiB (100%)"));
    assert_non_null(strstr(captured[1], "s left"));
    /* quiet wins */
    c.quiet = true;
    capture_begin();
    ui_init(&ui, "t", &c);
    work(&ui, 0);
    capture_end();
    assert_string_equal(captured[1], "");
    /* a terminal: nothing for short work; after a second a line, cleaned at the end */
    c = (struct opt_common){0};
    setenv("QX_FAKE_TTY", "err", 1);
    capture_begin();
    ui_init(&ui, "t", &c);
    work(&ui, 0);
    capture_end();
    assert_string_equal(captured[1], "");
    capture_begin();
    ui_init(&ui, "t", &c);
    work(&ui, 15000); /* 1.5 s */
    ui_error(&ui, "done");
    capture_end();
    assert_non_null(strstr(captured[1], "loading "));
    assert_true(count(captured[1], '%') <= 8); /* ten a second for the last half second */
    assert_non_null(strstr(captured[1], "\r\033[Kt: done\n"));
    assert_int_equal(count(captured[1], '\n'), 1);
    unsetenv("QX_FAKE_TTY");
}

static void tables(void **state)
{
    static const struct table_col cols[] = {{"name", false, true}, {"bytes", true, false}};
    struct opt_common c = {0};
    struct ui ui;
    struct table t;
    (void)state;
    for (int tty = 0; tty < 2; tty++) {
        capture_begin();
        ui_init(&ui, "t", &c);
        ui.width_cols = tty ? 30 : 0;
        table_init(&t, cols, 2);
        table_cell(&t, "%s", "model.language_model.layers.0.mlp");
        table_cell(&t, "%d", 12);
        table_cell(&t, "%s", "caf\xc3\xa9\x1b[0m");
        table_cell(&t, "%d", 123456);
        table_print(&t, &ui, 2);
        table_fini(&t);
        ui_out_flush();
        capture_end();
        assert_null(strchr(captured[0], '\033'));
        if (tty) {
            assert_string_equal(captured[0], "  name                   bytes\n"
                                             "  model.language_mode\xe2\x80\xa6      12\n"
                                             "  caf\xc3\xa9\\x1b[0m           123456\n");
        } else {
            assert_string_equal(captured[0], "  name                                bytes\n"
                                             "  model.language_model.layers.0.mlp      12\n"
                                             "  caf\xc3\xa9\\x1b[0m                        123456\n");
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_lines), cmocka_unit_test(environment), cmocka_unit_test(wrong_lines), cmocka_unit_test(answers),
        cmocka_unit_test(progress_lines), cmocka_unit_test(tables),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    qx_u64_list_fini(&v.list);
    return rc;
}
