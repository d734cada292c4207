/* Wrong use of the library: each case gives an errno and does no harm. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <udm.h>
#include <unistd.h>

static int wrong;

static void is(int line, const char *what, long long got, long long want)
{
	if (got != want) {
		printf("%d: %s: %lld, and not %lld: %s\n", line, what, got, want, udm_error());
		wrong = 1;
	}
}
#define IS(call, want) is(__LINE__, #call, (call), (want))

static int context, core, lane;
static char data[1 << 20];

static struct udm_request request(uint32_t op, uint64_t sector, uint64_t sectors)
{
	struct udm_request r = { .op = op, .sector = sector, .sectors = sectors, .cookie = 7 };
	if (op == UDM_READ || op == UDM_WRITE)
		r.buffer = data;
	return r;
}

static int submit(struct udm_request r)
{
	return udm_submit(core, lane, &r, 1);
}

/* The result of a request that is accepted. */
static int ends(struct udm_request r)
{
	struct udm_completion c = { 0 };
	IS(submit(r), 1);
	IS(udm_wait(core, &c, 1, 1, UDM_FOREVER), 1);
	IS(c.cookie, 7);
	IS(c.lane, lane);
	return c.error;
}

/* Another thread can't use this thread's core. */
static void *other(void *arg)
{
	struct udm_request r = request(UDM_READ, 0, 8);
	(void)arg;
	IS(udm_submit(core, lane, &r, 1), -EBADF);
	IS(udm_poll(core, NULL, 0), -EBADF);
	IS(udm_lane_open(core, "vol"), -EBADF);
	IS(udm_core_close(core), -EBADF);
	/* A core that the thread leaves open, with a completion that it does not fetch. */
	int own = udm_core_open(context, 1, UDM_ANY);
	IS(own > core, 1);
	int l = udm_lane_open(own, "vol");
	IS(l, 0);
	IS(udm_submit(own, l, &r, 1), 1);
	return NULL;
}

static void *resumes(void *arg)
{
	(void)arg;
	IS(udm_resume(context, "vol"), 0);
	return NULL;
}

/* Closes a context at the same time as another thread. */
static pthread_barrier_t both;

static void *closes(void *arg)
{
	pthread_barrier_wait(&both);
	*(int *)arg = udm_close(*(int *)arg);
	return NULL;
}

int main(void)
{
	struct udm_options options = { sizeof options, 2 };
	struct udm_completion c[4];
	char text[512];
	pthread_t thread;

	/* Ends the program if it hangs. */
	alarm(200);
	IS(udm_create(1, "vol", "0 8 error"), -EBADF);
	IS(udm_open(&(struct udm_options){ 4, 2 }), -EINVAL);
	IS(udm_open(&(struct udm_options){ sizeof options, 5000 }), -EINVAL);
	/* The close finds the background core awake, asleep or about to sleep. */
	for (int i = 0; i < 1000; i++) {
		context = udm_open(&options);
		IS(udm_create(context, "vol", "0 8 error"), 0);
		IS(udm_close(context), 0);
	}
	context = udm_open(&options);
	IS(context > 0, 1);

	/* Strings. */
	IS(udm_create(context, NULL, "0 8 error"), -EFAULT);
	IS(udm_create(context, "vol", NULL), -EFAULT);
	IS(udm_create(context, "a/b", "0 8 error"), -EINVAL);
	IS(udm_create(context, "\xff", "0 8 error"), -EINVAL);
	IS(udm_create(context, "vol", "0 8 nothing"), -EINVAL);
	IS(strstr(udm_error(), "unknown target type") && strstr(udm_error(), "^^^^^^^"), 1);
	IS(udm_create(context, "vol", "0 2048 linear mem:1M 1"), -EINVAL);
	IS(udm_create(context, "vol", "/no/such/file"), -ENOENT);
	char *endless = malloc(UDM_TEXT_MAX + 2);
	memset(endless, 'x', UDM_TEXT_MAX + 1);
	endless[UDM_TEXT_MAX + 1] = 0;
	IS(udm_create(context, "vol", endless), -E2BIG);
	free(endless);
	IS(udm_suspend(context, "vol", 0), -ENXIO);
	IS(udm_create(context, "vol", "0 2048 linear mem:1M 0"), 0);
	IS(udm_create(context, "vol", "0 2048 error"), -EBUSY);
	IS(udm_suspend(context, "vol", 64), -EINVAL);
	int len = udm_table(context, "vol", text, sizeof text);
	IS(len, (int)strlen(text));
	IS(strncmp(text, "0 2048 linear ", 14), 0);
	IS(udm_table(context, "vol", NULL, 0), len);
	IS(udm_table(context, "vol", NULL, 9), -EFAULT);
	char little[5] = "????";
	IS(udm_table(context, "vol", little, 4), len);
	IS(memcmp(little, "0 2\0", 5), 0);
	IS(udm_message(context, "vol", 0, "what", text, sizeof text), -EINVAL);

	/* Cores and lanes. */
	IS(udm_core_open(context + 100, 0, UDM_ANY), -EBADF);
	IS(udm_core_open(context, 2, UDM_ANY), -EINVAL);
	IS(udm_core_open(context, -2, UDM_ANY), -EINVAL);
	IS(udm_core_open(context, 0, 100000), -EINVAL);
	core = udm_core_open(context, 0, UDM_ANY);
	IS(core > 0, 1);
	IS(udm_core_open(context, 0, UDM_ANY), -EBUSY);
	IS(udm_lane_open(core, "nothing:1M"), -EINVAL);
	IS(udm_lane_open(core, NULL), -EFAULT);
	lane = udm_lane_open(core, "vol");
	IS(lane, 0);
	IS(udm_lane_close(core, 1), -EBADF);
	IS(udm_lane_close(core, -1), -EBADF);
	IS(udm_remove(context, "vol"), -EBUSY);
	IS(udm_close(context), -EBUSY);

	/* Malformed requests. */
	struct udm_request r = request(99, 0, 8);
	IS(submit(r), -EINVAL);
	r = request(UDM_READ, 0, 8);
	r.flags = UDM_FUA;
	IS(submit(r), -EINVAL);
	r = request(UDM_READ, 0, 8);
	r.reserved = 1;
	IS(submit(r), -EINVAL);
	r = request(UDM_READ, 0, 8);
	r.buffer = NULL;
	IS(submit(r), -EFAULT);
	r = request(UDM_FLUSH, 0, 0);
	r.buffer = data;
	IS(submit(r), -EINVAL);
	IS(submit(request(UDM_FLUSH, 8, 0)), -EINVAL);
	IS(submit(request(UDM_READ, 0, UDM_LENGTH_MAX / 512 + 1)), -EINVAL);
	struct iovec iov[2] = { { data, 1000 }, { data + 8192, 3096 } };
	r = (struct udm_request){ .op = UDM_WRITE, .sectors = 9, .iov = iov, .iov_count = 2 };
	IS(submit(r), -EINVAL);
	r.sectors = 8;
	r.iov_count = UDM_IOV_MAX + 1;
	IS(submit(r), -EINVAL);
	r.iov_count = 2;
	r.iov = NULL;
	IS(submit(r), -EFAULT);
	r.iov = iov;
	r.buffer = data;
	IS(submit(r), -EINVAL);
	IS(udm_submit(core, lane, NULL, 1), -EFAULT);
	IS(udm_submit(core, lane, (void *)((char *)&r + 1), 1), -EINVAL);
	IS(udm_submit(core, 1, &r, 1), -EBADF);
	IS(udm_submit(core, lane, NULL, 0), 0);
	IS(udm_wait(core, NULL, 1, 1, UDM_FOREVER), -EFAULT);
	IS(udm_wait(core, c, 1, 1, -2), -EINVAL);
	IS(udm_wait(core, c, 1, 4, UDM_FOREVER), 0);

	/* Requests that the device fails. */
	IS(ends(request(UDM_READ, 2048, 8)), -EIO);
	IS(ends(request(UDM_READ, ~0ull, 8)), -EIO);
	IS(ends(request(UDM_READ, 0, 0)), -EINVAL);
	IS(ends(request(UDM_FLUSH, 0, 0)), 0);

	/* A batch ends at the first malformed request. */
	struct udm_request batch[3] = { request(UDM_READ, 0, 8), request(99, 0, 8), request(UDM_READ, 0, 8) };
	IS(udm_submit(core, lane, NULL, 1), -EFAULT);
	IS(udm_submit(core, lane, batch, 3), 1);
	IS(!strstr(udm_error(), "no operation 99"), 0);
	IS(udm_lane_close(core, lane), -EBUSY);
	IS(udm_core_close(core), -EBUSY);
	IS(udm_wait(core, c, 4, 4, UDM_FOREVER), 1);

	/* Scattered data. */
	for (int i = 0; i < 4096; i++)
		data[i < 1000 ? i : i + 7192] = (char)(i % 251);
	r = (struct udm_request){ .op = UDM_WRITE, .sector = 16, .sectors = 8, .iov = iov, .iov_count = 2, .cookie = 7 };
	IS(ends(r), 0);
	memset(data, 0, sizeof data);
	IS(ends(request(UDM_READ, 16, 8)), 0);
	for (int i = 0; i < 4096; i++)
		if (data[i] != (char)(i % 251)) {
			IS(i, -1);
			break;
		}
	r = request(UDM_WRITE_ZEROES, 16, 8);
	r.flags = UDM_NOUNMAP;
	IS(ends(r), 0);
	IS(ends(request(UDM_READ, 16, 8)), 0);
	IS(data[1], 0);
	r = request(UDM_WRITE, 0, 8);
	r.flags = UDM_FUA;
	IS(ends(r), 0);

	/* A thread that is a core changes a device of its lanes; requests in flight wait meanwhile. */
	IS(udm_suspend(context, "vol", 0), 0);
	IS(submit(request(UDM_READ, 0, 8)), 1);
	IS(udm_wait(core, c, 1, 1, 20 * 1000 * 1000), 0);
	IS(udm_load(context, "vol", "0 4096 linear mem:2M 0"), 0);
	IS(pthread_create(&thread, NULL, resumes, NULL), 0);
	IS(udm_wait(core, c, 1, 1, UDM_FOREVER), 1);
	IS(c[0].error, 0);
	while (pthread_tryjoin_np(thread, NULL) == EBUSY)
		IS(udm_wait(core, c, 0, 0, 0), 0);
	IS(ends(request(UDM_READ, 4088, 8)), 0);
	struct udm_limits limits;
	IS(udm_device_limits(context, "vol", &limits), 0);
	IS(limits.sectors, 4096);
	IS(udm_device_limits(context, "null:size=1G,bs=4096", &limits), 0);
	IS(limits.sectors == 2 << 20 && limits.logical_block == 4096, 1);

	IS(pthread_create(&thread, NULL, other, NULL), 0);
	IS(pthread_join(thread, NULL), 0);
	/* The ended thread has released its slot. */
	int again = udm_core_open(context, 1, UDM_ANY);
	IS(again > 0, 1);
	IS(udm_core_close(again), 0);
	IS(udm_core_close(again), -EBADF);

	/* A child can't use its parent's handles, and can open its own. */
	fflush(stdout);
	pid_t child = fork();
	if (child == 0) {
		IS(udm_poll(core, NULL, 0), -ECHILD);
		IS(udm_table(context, "vol", text, sizeof text), -ECHILD);
		int own = udm_open(&options);
		IS(own > 0, 1);
		IS(udm_create(own, "vol", "mem:1M"), 0);
		IS(udm_close(own), 0);
		fflush(stdout);
		_exit(wrong);
	}
	int status = -1;
	IS(waitpid(child, &status, 0), child);
	IS(status, 0);

	IS(udm_lane_close(core, lane), 0);
	IS(udm_core_close(core), 0);
	IS(udm_create(context, "top", "0 8 linear @vol 0"), 0);
	IS(udm_remove(context, "vol"), -EBUSY);
	IS(udm_close(context), 0);
	IS(udm_close(context), -EBADF);

	/* If two threads close a context, one of them succeeds. */
	IS(pthread_barrier_init(&both, NULL, 2), 0);
	for (int i = 0; i < 50; i++) {
		int one = udm_open(NULL), two = one;
		IS(pthread_create(&thread, NULL, closes, &two), 0);
		closes(&one);
		IS(pthread_join(thread, NULL), 0);
		IS(one + two, -EBADF);
	}
	if (!wrong)
		puts("refused what had to be");
	return wrong;
}
