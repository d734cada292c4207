/*
 * libudm: the Linux device mapper in user space, in the caller's own threads.
 *
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Generated from crates/udm-capi/src. docs/library.md has a complete example.
 *
 * A function that returns int returns 0 or more on success, or a negative errno; udm_error() then has
 * the reason as text. Handles are numbers, like file descriptors; an invalid one is refused with EBADF.
 * All threads may use a context and its devices. Only the thread that opened a core may use the core
 * and its lanes. After a fork the child must open its own context.
 *
 * Strings are UTF-8 and end with a NUL. Each pointer must point to what its function describes. It may
 * be NULL only if that is allowed there, or if the length beside it is 0.
 */
#ifndef UDM_H
#define UDM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Read from the device into the buffer. */
#define UDM_READ (0u)

/* Write the buffer to the device. */
#define UDM_WRITE (1u)

/* Make all writes durable that completed before it was submitted. No range, no buffer. */
#define UDM_FLUSH (2u)

/* The content of the range is no longer needed. No buffer. */
#define UDM_DISCARD (3u)

/* The range reads as zeroes from now on. No buffer. */
#define UDM_WRITE_ZEROES (4u)

/* Flag of a write: complete only when it is durable. */
#define UDM_FUA (1u)

/* Flag of a write of zeroes: leave the blocks allocated. */
#define UDM_NOUNMAP (2u)

/* Flag of a suspend: hold back requests in flight instead of waiting for them. */
#define UDM_NOFLUSH (1u)

/* Any free core; no particular CPU. */
#define UDM_ANY (-1)

/* No time limit. */
#define UDM_FOREVER (-1)

/* Maximum number of requests in flight per core. */
#define UDM_IN_FLIGHT_MAX (65536u)

/* Maximum length of a request in bytes, and maximum number of its buffers. */
#define UDM_LENGTH_MAX (1073741824ull)
#define UDM_IOV_MAX (1024u)

/* Maximum length of a name, table or message in bytes. */
#define UDM_TEXT_MAX (1048576u)

/* Options of a context. */
struct udm_options {
	/* The size of this structure in bytes. */
	uint32_t size;
	/* Maximum number of threads that are cores at a time, 1 to 1023; 0 for one per CPU. */
	uint32_t cores;
};

/* Size and limits of a device. */
struct udm_limits {
	/* Size in sectors of 512 bytes. */
	uint64_t sectors;
	/* Every range must be aligned to this many bytes. */
	uint32_t logical_block;
	/* Writes smaller than this many bytes cost a read. */
	uint32_t physical_block;
	/* Maximum length of a discard and of a write of zeroes in sectors; 0 if not supported. */
	uint64_t discard_max;
	uint64_t write_zeroes_max;
	/* 1 if writes fail. */
	uint32_t read_only;
	/* 1 if writes need a flush to be durable. */
	uint32_t write_cache;
};

/* A request. Fields that its operation does not use must be 0. */
struct udm_request {
	/* UDM_READ, ... */
	uint32_t op;
	/* UDM_FUA, UDM_NOUNMAP. */
	uint32_t flags;
	/* The first sector, and the number of sectors. */
	uint64_t sector;
	uint64_t sectors;
	/* The memory to read or write, of the length of the range. Used if iov_count is 0. */
	void *buffer;
	/* Otherwise a list of buffers, together as long as the range. The list may be freed after the
	   submit, the buffers only after the completion. */
	const struct iovec *iov;
	uint32_t iov_count;
	/* Must be 0. */
	uint32_t reserved;
	/* Returned in the completion. */
	uint64_t cookie;
};

/* A completed request. */
struct udm_completion {
	/* The cookie of the request. */
	uint64_t cookie;
	/* 0, or a negative errno. */
	int32_t error;
	/* The lane that it was submitted to. */
	int32_t lane;
};

/* The version of the library, such as "0.1.0". */
const char *udm_version(void);

/* The reason why the last failing call of this thread failed, in one or more lines; or why the
   last udm_submit accepted fewer requests than given. Valid until the next such call. */
const char *udm_error(void);

/* Opens a context, which holds devices. `options` may be NULL. Returns its handle. */
int udm_open(const struct udm_options *options);

/* Closes a context with all of its devices. EBUSY while threads are cores of it. */
int udm_close(int context);

/* Creates a mapped device with a live table. A table of one word means the whole device of that
   word. */
int udm_create(int context, const char *name, const char *table);

/* Loads a table into the inactive slot of a device; a resume makes it live. */
int udm_load(int context, const char *name, const char *table);

/* Holds back new requests of a device. Without UDM_NOFLUSH it waits for those in flight. Every
   thread that has a lane of the device must poll or wait meanwhile. */
int udm_suspend(int context, const char *name, uint32_t flags);

/* Makes the loaded table live, if there is one, and lets requests continue. Every thread that has
   a lane of the device must poll or wait meanwhile. */
int udm_resume(int context, const char *name);

/* Removes a device. EBUSY while a lane of it is open, or another device uses it. */
int udm_remove(int context, const char *name);

/* Sends a message to the target at `sector`. Writes its answer into `text`, which has `len` bytes,
   like snprintf. Returns the length of the whole answer. */
int udm_message(int context, const char *name, uint64_t sector, const char *message, char *text, size_t len);

/* Writes the live table of a device into `text`, in dmsetup's format, like snprintf. Returns the
   length of the whole text. */
int udm_table(int context, const char *name, char *text, size_t len);

/* Writes the status of a device into `text`, in dmsetup's format, like snprintf. Returns the
   length of the whole text. */
int udm_status(int context, const char *name, char *text, size_t len);

/* Writes size and limits of a device to `limits`. `device` is the name of a mapped device, or any
   device word of a table: "null:size=1G", a file, a block device. */
int udm_device_limits(int context, const char *device, struct udm_limits *limits);

/* Makes the calling thread a core of the context. `number` is its number, from 0, which tables use
   as CPU number; `cpu` is the CPU to run on. Both may be UDM_ANY. Returns a handle that only this
   thread may use. */
int udm_core_open(int context, int32_t number, int32_t cpu);

/* Closes the core and its lanes; the thread is no longer a core. EBUSY while requests are in
   flight. */
int udm_core_close(int core);

/* Opens a lane of a device on this core. `device` is the name of a mapped device, or any device
   word of a table. Returns the number of the lane, from 0; numbers of closed lanes are reused. */
int udm_lane_open(int core, const char *device);

/* Closes a lane. EBUSY while requests of it are in flight. */
int udm_lane_close(int core, int lane);

/* Submits `count` requests to a lane, as one batch. Nothing is copied: the buffers of a request
   belong to udm until it completes. Returns how many requests were accepted. If these are fewer
   than `count`, the next one was refused, and udm_error() has the reason. If none was accepted,
   returns an errno: EAGAIN if too many are in flight. */
int udm_submit(int core, int lane, const struct udm_request *requests, uint32_t count);

/* Runs a turn of the core, and writes up to `max` completed requests to `completions`. Returns how
   many. Never waits. */
int udm_poll(int core, struct udm_completion *completions, uint32_t max);

/* As udm_poll, but waits until `min` requests are completed, or all in flight if those are fewer.
   Waits at most `timeout` nanoseconds, or without limit for UDM_FOREVER. The thread sleeps during
   a long wait. */
int udm_wait(int core, struct udm_completion *completions, uint32_t min, uint32_t max, int64_t timeout);

#ifdef __cplusplus
}
#endif

#endif
