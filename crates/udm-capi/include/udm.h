/*
 * libudm: the Linux device mapper in user space, in the caller's own threads.
 *
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Made of crates/udm-capi/src. docs/library.md has a complete example.
 *
 * A function that returns int returns 0 or more, or an errno as a negative number; udm_error() has
 * the reason in words then. Handles are numbers, as file descriptors are: what is none is refused
 * with EBADF. A context and its devices may be used from all threads, a core and its lanes from the
 * one alone that opened it. After a fork the child opens its own.
 *
 * Strings end with a NUL and are UTF-8. Pointers lead to what is said of them; they may be NULL only
 * where that is said, or where the length beside them is 0.
 */
#ifndef UDM_H
#define UDM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Fill the buffer from the device. */
#define UDM_READ (0u)

/* Put the buffer on the device. */
#define UDM_WRITE (1u)

/* Make all writes durable that completed before it was submitted. No range, no buffer. */
#define UDM_FLUSH (2u)

/* The range is of no more use. No buffer. */
#define UDM_DISCARD (3u)

/* The range reads as zeroes from now on. No buffer. */
#define UDM_WRITE_ZEROES (4u)

/* Of a write: complete only when it is durable. */
#define UDM_FUA (1u)

/* Of a write of zeroes: leave the blocks allocated. */
#define UDM_NOUNMAP (2u)

/* Of a suspend: hold back what is in flight, and do not wait for it. */
#define UDM_NOFLUSH (1u)

/* Any core that is free; no CPU in particular. */
#define UDM_ANY (-1)

/* Wait for as long as it takes. */
#define UDM_FOREVER (-1)

/* Requests of a core that may be in flight. */
#define UDM_IN_FLIGHT_MAX (65536u)

/* The longest request in bytes, and the most buffers that it can have. */
#define UDM_LENGTH_MAX (1073741824ull)
#define UDM_IOV_MAX (1024u)

/* The longest name, table or message in bytes. */
#define UDM_TEXT_MAX (1048576u)

/* How a context is to be. */
struct udm_options {
	/* The size of this structure. */
	uint32_t size;
	/* How many threads may be cores at a time, 1 to 1023; 0 for one a CPU. */
	uint32_t cores;
};

/* Size and limits of a device. */
struct udm_limits {
	/* Size in sectors of 512 bytes. */
	uint64_t sectors;
	/* Every range is aligned to this many bytes. */
	uint32_t logical_block;
	/* Smaller writes cost a read. */
	uint32_t physical_block;
	/* The longest discard and the longest write of zeroes in sectors; 0 where it can't. */
	uint64_t discard_max;
	uint64_t write_zeroes_max;
	/* 1 where writes fail. */
	uint32_t read_only;
	/* 1 where a flush means something. */
	uint32_t write_cache;
};

/* A request. What it has no use for is 0. */
struct udm_request {
	/* UDM_READ, ... */
	uint32_t op;
	/* UDM_FUA, UDM_NOUNMAP. */
	uint32_t flags;
	/* The first sector, and how many. */
	uint64_t sector;
	uint64_t sectors;
	/* The memory to read or write, as long as the range, where iov_count is 0. */
	void *buffer;
	/* Else the list of its parts, as long as the range together. The list may go when it is
	   submitted, what it leads to must stay. */
	const struct iovec *iov;
	uint32_t iov_count;
	/* 0. */
	uint32_t reserved;
	/* What its completion is told apart by. */
	uint64_t cookie;
};

/* A request that is over. */
struct udm_completion {
	/* The request's. */
	uint64_t cookie;
	/* 0, or the errno as a negative number. */
	int32_t error;
	/* The lane that it was submitted to. */
	int32_t lane;
};

/* The version of the library, as "0.1.0". */
const char *udm_version(void);

/* Why the last call of this thread that failed did, in one line or more, or why the last
   udm_submit took fewer requests than it was given. It stays until the next one that does. */
const char *udm_error(void);

/* Opens a context, which has devices. `options` may be NULL. Returns its handle. */
int udm_open(const struct udm_options *options);

/* Closes a context with all of its devices. EBUSY while threads are cores of it. */
int udm_close(int context);

/* Makes a mapped device with a table, which is live then. A table that is one word is a device,
   all of it. */
int udm_create(int context, const char *name, const char *table);

/* Loads a table into the inactive slot of a device; a resume makes it live. */
int udm_load(int context, const char *name, const char *table);

/* Holds back the requests of a device from now on. Without UDM_NOFLUSH it waits for those in
   flight. It needs all threads that have a lane of it: each has to poll or wait. */
int udm_suspend(int context, const char *name, uint32_t flags);

/* Makes the table live that was loaded, and lets requests go. It needs the same threads. */
int udm_resume(int context, const char *name);

/* Removes a device. EBUSY while a lane of it is open, or another device lies on it. */
int udm_remove(int context, const char *name);

/* Sends a message to the target at `sector`. Writes its answer into `text`, which has `len` bytes,
   as snprintf does; returns how long it is whole. */
int udm_message(int context, const char *name, uint64_t sector, const char *message, char *text, size_t len);

/* Writes the live table of a device into `text`, as dmsetup prints it and snprintf does; returns
   how long it is whole. */
int udm_table(int context, const char *name, char *text, size_t len);

/* Writes the status of a device into `text`, as dmsetup prints it and snprintf does; returns how
   long it is whole. */
int udm_status(int context, const char *name, char *text, size_t len);

/* Writes size and limits of a device to `limits`. It is a mapped device by its name, or anything
   that a table can name: "null:size=1G", a file, a block device. */
int udm_device_limits(int context, const char *device, struct udm_limits *limits);

/* Makes the calling thread a core of the context: `number` counts from 0 and is what a CPU is in
   tables; `cpu` is the one to stay on. Both may be UDM_ANY. Returns a handle for this thread
   alone. */
int udm_core_open(int context, int32_t number, int32_t cpu);

/* The thread is no core any more; its lanes are closed. EBUSY while requests are in flight. */
int udm_core_close(int core);

/* Opens a lane of a device on this core: a mapped device by its name, or anything that a table can
   name. Returns its number, from 0; a number is used again when its lane was closed. */
int udm_lane_open(int core, const char *device);

/* Closes a lane. EBUSY while requests of it are in flight. */
int udm_lane_close(int core, int lane);

/* Submits `count` requests to a lane, as one batch. The memory of each is udm's until it is over:
   nothing is copied. Returns how many were taken; where that is fewer, the next one was refused,
   and udm_error() says why. Where none was taken it is an errno: EAGAIN when too many are in
   flight. */
int udm_submit(int core, int lane, const struct udm_request *requests, uint32_t count);

/* Takes a turn, and writes up to `max` requests that are over to `completions`. Returns how many.
   Never waits. */
int udm_poll(int core, struct udm_completion *completions, uint32_t max);

/* As udm_poll, but waits until `min` of those in flight are over, or `timeout` nanoseconds, or
   UDM_FOREVER. The thread sleeps where that takes long. */
int udm_wait(int core, struct udm_completion *completions, uint32_t min, uint32_t max, int64_t timeout);

#ifdef __cplusplus
}
#endif

#endif
