/*
 * An engine for fio that accesses devices of udm, in fio's own threads.
 *
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * This file is under the licences of udm, of which MIT is compatible with the GPL. The binary is
 * built with fio's headers, which are under GPL version 2. So it is for local use and is not
 * distributed with udm.
 *
 * All jobs of one fio share one context and its devices, as they would share those of the kernel.
 * Jobs are always threads, even without `thread`. A job is a core, and each of its files a lane.
 *
 * fio takes completions one by one and queues a request after each. The engine takes all available
 * completions. Once it has handed out all of them, it sends the queued requests as one batch. So a
 * request only waits for completions that have already arrived.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <udm.h>

#include "fio.h"
#include "optgroup.h"

/* A device that an option names. */
struct device {
	struct device *next;
	char *table;
	int made;
	char name[];
};

/* The devices and the context of all jobs. Only fio's main thread uses them until the jobs start. */
static struct device *devices;
static int context = -1;

struct job {
	int core;
	unsigned int queued;
	/* The queue: requests, their lanes, and the io_u of each. */
	struct udm_request *requests;
	int *lanes;
	struct io_u **io_us;
	/* Completions. Those of the last getevents begin at `given`, the ones after it at `next`. */
	struct udm_completion *done;
	unsigned int given, next, end;
	/* fio may sleep while requests are queued, so each one is sent at once. */
	int sleeps;
};

struct options {
	/* An option can't be at offset 0. */
	void *pad;
	char *device;
};

/* Parses NAME=TABLE. Every job repeats the option; a name must always have the same table. */
static int add_device(void *data, const char *word)
{
	const char *table = strchr(word, '=');
	struct device **end = &devices, *one;
	size_t len;

	(void)data;
	if (!table || table == word) {
		log_err("udm: udm_device=%s: not NAME=TABLE\n", word);
		return 1;
	}
	len = (size_t)(table++ - word);
	for (; *end; end = &(*end)->next) {
		if (strlen((*end)->name) != len || memcmp((*end)->name, word, len))
			continue;
		if (!strcmp((*end)->table, table))
			return 0;
		log_err("udm: %s has two tables\n", (*end)->name);
		return 1;
	}
	one = calloc(1, sizeof(*one) + len + 1);
	if (!one)
		return 1;
	memcpy(one->name, word, len);
	one->table = strdup(table);
	*end = one;
	return !one->table;
}

static struct fio_option options[] = {
	{
		.name = "udm_device",
		.lname = "A device of udm",
		.type = FIO_OPT_STR_STORE,
		.cb = add_device,
		.off1 = offsetof(struct options, device),
		.help = "NAME=TABLE of a mapped device, for --filename=NAME; may be given again",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{ .name = NULL },
};

static int failed(const char *what, int result)
{
	log_err("udm: %s: %s\n", what, udm_error());
	return -result;
}

/* Makes the devices that do not exist yet, in the order of their options. */
static int make_devices(void)
{
	/* One core per job of all groups. */
	struct udm_options of = { .size = sizeof(of), .cores = thread_number };

	if (context < 0)
		context = udm_open(&of);
	if (context < 0)
		return failed("context", context);
	for (struct device *one = devices; one; one = one->next) {
		int made = one->made ? 0 : udm_create(context, one->name, one->table);

		if (made < 0)
			return failed(one->name, made);
		one->made = 1;
	}
	return 0;
}

/* Runs in fio's main thread, for one job after another. */
static int setup(struct thread_data *td)
{
	struct fio_file *f;
	unsigned int i;
	int error;

	td->o.use_thread = 1;
	error = make_devices();
	if (error)
		return error;
	for_each_file(td, f, i) {
		struct udm_limits limits;
		int found = udm_device_limits(context, f->file_name, &limits);

		if (found < 0)
			return failed(f->file_name, found);
		if (limits.sectors > UINT64_MAX / 512)
			return failed(f->file_name, -EFBIG);
		f->real_file_size = limits.sectors * 512;
		f->filetype = FIO_TYPE_BLOCK;
		fio_file_set_size_known(f);
	}
	return 0;
}

static void cleanup(struct thread_data *td)
{
	struct job *job = td->io_ops_data;

	if (!job)
		return;
	if (job->core > 0)
		udm_core_close(job->core);
	free(job->requests);
	free(job->lanes);
	free(job->io_us);
	free(job->done);
	free(job);
	td->io_ops_data = NULL;
}

/* Runs in the job's own thread, as do all functions below. */
static int init(struct thread_data *td)
{
	struct job *job = calloc(1, sizeof(*job));
	size_t depth = td->o.iodepth;

	if (!job)
		return ENOMEM;
	td->io_ops_data = job;
	job->requests = calloc(depth, sizeof(*job->requests));
	job->lanes = calloc(depth, sizeof(*job->lanes));
	job->io_us = calloc(depth, sizeof(*job->io_us));
	job->done = calloc(depth, sizeof(*job->done));
	if (!job->requests || !job->lanes || !job->io_us || !job->done)
		return ENOMEM;
	job->sleeps = td->o.thinktime || (td->flags & TD_F_CHECK_RATE);
	/* fio counts jobs from 1. It has already pinned the thread, if an option requires this. */
	job->core = udm_core_open(context, (int)td->thread_number - 1, UDM_ANY);
	if (job->core < 0)
		return failed("core", job->core);
	return 0;
}

static int open_file(struct thread_data *td, struct fio_file *f)
{
	struct job *job = td->io_ops_data;
	int lane = (int)(intptr_t)FILE_ENG_DATA(f) - 1;

	if (lane < 0) {
		lane = udm_lane_open(job->core, f->file_name);
		if (lane < 0) {
			td_verror(td, failed(f->file_name, lane), "udm_lane_open");
			return 1;
		}
		FILE_SET_ENG_DATA(f, (void *)(intptr_t)(lane + 1));
	}
	f->fd = lane;
	return 0;
}

/* The lane stays open until the job ends. fio opens a file again for each pass, and a device in
 * memory loses its data if it is not open. */
static int close_file(struct thread_data *td, struct fio_file *f)
{
	(void)td;
	f->fd = -1;
	return 0;
}

static enum fio_q_status queue(struct thread_data *td, struct io_u *io_u)
{
	struct job *job = td->io_ops_data;
	struct udm_request *r = &job->requests[job->queued];
	int has_range = 1;

	fio_ro_check(td, io_u);
	if (job->queued == td->o.iodepth)
		return FIO_Q_BUSY;
	memset(r, 0, sizeof(*r));
	switch (io_u->ddir) {
	case DDIR_READ:
		r->op = UDM_READ;
		r->buffer = io_u->xfer_buf;
		break;
	case DDIR_WRITE:
		r->op = UDM_WRITE;
		r->buffer = io_u->xfer_buf;
		r->flags = td->o.sync_io ? UDM_FUA : 0;
		break;
	case DDIR_TRIM:
		r->op = UDM_DISCARD;
		break;
	case DDIR_SYNC:
	case DDIR_DATASYNC:
	case DDIR_SYNC_FILE_RANGE:
		r->op = UDM_FLUSH;
		has_range = 0;
		break;
	default:
		io_u->error = EINVAL;
		return FIO_Q_COMPLETED;
	}
	if (has_range) {
		if ((io_u->offset | io_u->xfer_buflen) & 511) {
			io_u->error = EINVAL;
			return FIO_Q_COMPLETED;
		}
		r->sector = io_u->offset / 512;
		r->sectors = io_u->xfer_buflen / 512;
	}
	r->cookie = (uint64_t)(uintptr_t)io_u;
	job->lanes[job->queued] = io_u->file->fd;
	job->io_us[job->queued] = io_u;
	job->queued++;
	return FIO_Q_QUEUED;
}

/* Sets the issue time of a batch of requests. The clock is read once, before the batch is sent. */
static void issued(struct thread_data *td, struct io_u **io_us, unsigned int count, const struct timespec *at)
{
	if (!fio_fill_issue_time(td))
		return;
	for (unsigned int i = 0; i < count; i++) {
		io_us[i]->issue_time = *at;
		io_u_queued(td, io_us[i]);
	}
	if (td->o.read_iolog_file)
		td->last_issue = *at;
}

/* Moves the completions that fio has not seen to the front. */
static void move_to_front(struct job *job)
{
	job->end -= job->next;
	memmove(job->done, &job->done[job->next], job->end * sizeof(*job->done));
	job->given = job->next = 0;
}

/* Removes the first `count` requests from the queue. */
static void dequeue(struct job *job, unsigned int count)
{
	if (!count)
		return;
	job->queued -= count;
	memmove(job->requests, &job->requests[count], job->queued * sizeof(*job->requests));
	memmove(job->lanes, &job->lanes[count], job->queued * sizeof(*job->lanes));
	memmove(job->io_us, &job->io_us[count], job->queued * sizeof(*job->io_us));
}

/* Sends the queue, as one batch per run of requests to the same lane. Requests stay queued while
 * too many are in flight. A refused request completes with the error; the others are not affected. */
static void send_queued(struct thread_data *td, struct job *job)
{
	unsigned int sent = 0;

	while (sent < job->queued) {
		unsigned int end = sent + 1;
		struct timespec now = { 0 };
		int taken;

		while (end < job->queued && job->lanes[end] == job->lanes[sent])
			end++;
		if (fio_fill_issue_time(td))
			fio_gettime(&now, NULL);
		taken = udm_submit(job->core, job->lanes[sent], &job->requests[sent], end - sent);
		if (taken == -EAGAIN)
			break;
		if (taken < 0) {
			failed("submit", taken);
			move_to_front(job);
			job->done[job->end].cookie = job->requests[sent].cookie;
			job->done[job->end++].error = taken;
			issued(td, &job->io_us[sent++], 1, &now);
			continue;
		}
		issued(td, &job->io_us[sent], (unsigned int)taken, &now);
		io_u_mark_submit(td, (unsigned int)taken);
		sent += (unsigned int)taken;
	}
	dequeue(job, sent);
}

static int commit(struct thread_data *td)
{
	struct job *job = td->io_ops_data;

	if (job->next == job->end || job->sleeps)
		send_queued(td, job);
	return 0;
}

static int getevents(struct thread_data *td, unsigned int min, unsigned int max, const struct timespec *t)
{
	struct job *job = td->io_ops_data;
	unsigned int here = job->end - job->next;

	if (here < min || !here) {
		int64_t timeout = t ? (int64_t)t->tv_sec * 1000000000 + t->tv_nsec : UDM_FOREVER;

		move_to_front(job);
		do {
			unsigned int wanted;
			int done;

			send_queued(td, job);
			wanted = min > job->end ? min - job->end : 0;
			/* Queued requests cannot complete, so wait for only one completion. */
			if (job->queued && wanted)
				wanted = 1;
			done = udm_wait(job->core, &job->done[job->end], wanted, td->o.iodepth - job->end, timeout);
			if (done < 0) {
				failed("wait", done);
				return done;
			}
			job->end += (unsigned int)done;
			/* The timeout has expired. */
			if (!done)
				break;
		} while (job->end < min && job->queued);
		here = job->end;
	}
	job->given = job->next;
	job->next += here < max ? here : max;
	return (int)(job->next - job->given);
}

static struct io_u *event(struct thread_data *td, int number)
{
	struct job *job = td->io_ops_data;
	struct udm_completion *done = &job->done[job->given + (unsigned int)number];
	struct io_u *io_u = (struct io_u *)(uintptr_t)done->cookie;

	io_u->error = (unsigned int)-done->error;
	return io_u;
}

/* Runs when fio ends or unloads the engine. */
__attribute__((destructor)) static void end(void)
{
	if (context > 0)
		udm_close(context);
}

struct ioengine_ops ioengine = {
	.name = "udm",
	.version = FIO_IOOPS_VERSION,
	.flags = FIO_RAWIO | FIO_DISKLESSIO | FIO_NOEXTEND | FIO_NODISKUTIL | FIO_MEMALIGN | FIO_NO_OFFLOAD |
		 FIO_ASYNCIO_SETS_ISSUE_TIME,
	.setup = setup,
	.init = init,
	.queue = queue,
	.commit = commit,
	.getevents = getevents,
	.event = event,
	.cleanup = cleanup,
	.open_file = open_file,
	.close_file = close_file,
	.options = options,
	.option_struct_size = sizeof(struct options),
};
