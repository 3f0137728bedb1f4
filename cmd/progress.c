/* progress.c: when to draw and what. Drawing itself is ui.c's, which also clears the line before a
 * message. */
#include "progress.h"

#include "num.h"
#include "str.h"
#include "utf8.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define SECOND_NS 1000000000u

static atomic_uint lines_printed; /* plain lines of this process */

uint64_t progress_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND_NS + (uint64_t)t.tv_nsec;
}

static void amount(char out[48], uint64_t v, enum progress_unit unit)
{
    char s[32];
    snprintf(out, 48, "%s", unit == PROGRESS_BYTES ? qx_size_text(v, s) : qx_count_text(v, s));
}

static void line_text(const struct progress *p, uint64_t done, uint64_t now, char *out, size_t cap)
{
    char a[48], b[48], r[48];
    double s = (double)(now - p->begin_ns) / SECOND_NS;
    double rate = s > 0 ? (double)done / s : 0;
    amount(a, done, p->unit);
    amount(r, rate < 1.8e19 ? (uint64_t)rate : 0, p->unit);
    if (p->total == 0) {
        snprintf(out, cap, "%s: %s %s, %s/s", p->ui->program, p->what, a, r);
        return;
    }
    amount(b, p->total, p->unit);
    double left = rate > 0 && done < p->total ? (double)(p->total - done) / rate : 0;
    unsigned percent = (unsigned)(100.0 * (double)done / (double)p->total);
    if (left < 3600) {
        snprintf(out, cap, "%s: %s %s of %s (%u%%), %s/s, %.0f s left", p->ui->program, p->what, a, b,
                 percent, r, left);
    } else {
        snprintf(out, cap, "%s: %s %s of %s (%u%%), %s/s, %.1f h left", p->ui->program, p->what, a, b,
                 percent, r, left / 3600);
    }
}

static void draw(struct progress *p, uint64_t done, uint64_t now, bool last)
{
    char text[256];
    line_text(p, done, now, text, sizeof text);
    if (p->ui->tty_err) {
        size_t width = p->ui->width_err > 1 ? p->ui->width_err - 1 : 79;
        if (strlen(text) > width) {
            text[width] = '\0'; /* text is ASCII: a wrapped line could not be cleared */
        }
        ui_status_line(text);
        return;
    }
    /* The final line is kept a place, so that short jobs show one. */
    unsigned limit = last ? PROGRESS_MAX_LINES : PROGRESS_MAX_LINES - 2;
    if (atomic_load(&lines_printed) >= limit) {
        return;
    }
    atomic_fetch_add(&lines_printed, 1);
    ui_stat(p->ui, "%s", text);
}

void progress_start(struct progress *p, const struct ui *ui, const char *what, uint64_t total,
                    enum progress_unit unit)
{
    memset(p, 0, sizeof *p);
    p->ui = ui;
    p->what = what;
    p->total = total;
    p->unit = unit;
    p->on = ui->progress;
    p->begin_ns = progress_now_ns();
    pthread_mutex_init(&p->lock, NULL);
    atomic_store(&p->next_ns, p->begin_ns + (ui->progress_always && ui->tty_err ? 0 : SECOND_NS));
}

static void maybe_draw(struct progress *p, uint64_t done)
{
    uint64_t now = progress_now_ns();
    if (now < atomic_load_explicit(&p->next_ns, memory_order_relaxed)) {
        return;
    }
    if (pthread_mutex_trylock(&p->lock) != 0) {
        return; /* another thread is drawing */
    }
    if (now >= atomic_load(&p->next_ns)) {
        if (p->ui->tty_err) {
            atomic_store(&p->next_ns, now + SECOND_NS / 10);
            draw(p, done, now, false);
        } else if (p->total == 0 || done - p->line_done >= p->total / 10) {
            atomic_store(&p->next_ns, now + SECOND_NS);
            p->line_done = done;
            draw(p, done, now, false);
        } else {
            atomic_store(&p->next_ns, now + SECOND_NS);
        }
    }
    pthread_mutex_unlock(&p->lock);
}

void progress_update(struct progress *p, uint64_t done)
{
    uint64_t old = atomic_load_explicit(&p->done, memory_order_relaxed);
    while (old < done &&
           !atomic_compare_exchange_weak_explicit(&p->done, &old, done, memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
    if (p->on) {
        maybe_draw(p, done);
    }
}

void progress_add(struct progress *p, uint64_t n)
{
    uint64_t done = atomic_fetch_add_explicit(&p->done, n, memory_order_relaxed) + n;
    if (p->on) {
        maybe_draw(p, done);
    }
}

void progress_finish(struct progress *p)
{
    if (p->on) {
        if (p->ui->tty_err) {
            ui_status_line(NULL);
        } else {
            draw(p, atomic_load(&p->done), progress_now_ns(), true);
        }
    }
    p->on = false;
    pthread_mutex_destroy(&p->lock);
}
