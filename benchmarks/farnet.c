/* Links with a distance for benchmarks.farnet: what one tap interface sends, another receives later.
 *
 *     farnet QUEUE_MS SEED NAME...
 *
 * opens a tap interface for each NAME, in the network namespace it is started in, and says "ready".
 * A packet from member i to member j waits for its turn in the uplink of i, is on its way for the
 * delays of both, and waits for its turn in the downlink of j. Either link drops what would wait
 * longer than QUEUE_MS, and loses each packet that has passed it with a probability of its own: but
 * not who asks for addresses (ARP), which goes over no long way elsewhere.
 * Rates count all bytes of an Ethernet frame but its checksum.
 *
 * A line "INDEX UP_MBIT DOWN_MBIT DELAY_MS LOSS SIDE" on the standard input sets the link of a
 * member, and is answered by "set"; a packet whose ends have different sides is lost. The program
 * ends with its standard input. Whose packet is whose stands in its address: 02:00:00:00:HH:LL,
 * the index in its last two bytes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define MEMBERS 64
#define FRAME 2048 /* bytes; interfaces carry 1514 */
#define BATCH 64   /* packets of one interface before the next one is read */

typedef int64_t ns;

struct member {
    int fd;
    double up, down; /* nanoseconds a byte */
    ns delay;
    double loss;
    long side;
    ns up_free, down_free; /* when the last packet will have passed */
};

struct packet {
    int to;
    int length;
    unsigned char bytes[];
};

struct event {
    ns at;
    uint64_t order; /* of events at one time: as they were made */
    int delivered;  /* it has passed the downlink; before that it comes to it */
    struct packet *packet;
};

static struct member members[MEMBERS];
static int count;
static ns queue;
static uint64_t random_state;

static struct event *heap; /* the next one first */
static size_t pending, room;
static uint64_t made;

static ns now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (ns)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "farnet: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Uniform in [0, 1): xorshift64*, so that a seed gives the same losses for the same packets. */
static double chance(void) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (double)((random_state * 0x2545F4914F6CDD1DULL) >> 11) / 9007199254740992.0;
}

static int before(const struct event *a, const struct event *b) {
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void push(ns at, int delivered, struct packet *packet) {
    if (pending == room) {
        room = room ? 2 * room : 1024;
        heap = realloc(heap, room * sizeof *heap);
        if (!heap) fail("out of memory");
    }
    struct event event = {at, made++, delivered, packet};
    size_t i = pending++;
    while (i && before(&event, &heap[(i - 1) / 2])) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = event;
}

static struct event pop(void) {
    struct event first = heap[0], last = heap[--pending];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= pending) break;
        if (child + 1 < pending && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return first;
}

static int is_arp(const unsigned char *bytes) { return bytes[12] == 0x08 && bytes[13] == 0x06; }

/* When a packet that comes to a link at `at` has passed it, or -1 if it is dropped or lost. */
static ns pass(ns *free_at, double ns_per_byte, double loss, ns at, int length) {
    if (*free_at - at > queue) return -1;
    ns start = *free_at > at ? *free_at : at;
    *free_at = start + (ns)(length * ns_per_byte);
    return loss > 0 && chance() < loss ? -1 : *free_at;
}

static void send_to(int from, int to, ns left, const unsigned char *bytes, int length) {
    if (members[from].side != members[to].side) return;
    struct packet *packet = malloc(sizeof *packet + (size_t)length);
    if (!packet) fail("out of memory");
    packet->to = to;
    packet->length = length;
    memcpy(packet->bytes, bytes, (size_t)length);
    push(left + members[from].delay + members[to].delay, 0, packet);
}

static void take(int from) {
    unsigned char bytes[FRAME];
    struct member *member = &members[from];
    for (int i = 0; i < BATCH; i++) {
        int length = (int)read(member->fd, bytes, sizeof bytes);
        if (length < 0) return; /* nothing more, or the interface is gone */
        if (length < 14) continue;
        double loss = is_arp(bytes) ? 0 : member->loss;
        ns left = pass(&member->up_free, member->up, loss, now(), length);
        if (left < 0) continue;
        if (bytes[0] & 1) {
            for (int to = 0; to < count; to++)
                if (to != from) send_to(from, to, left, bytes, length);
        } else {
            int to = bytes[4] << 8 | bytes[5];
            if (to < count && to != from) send_to(from, to, left, bytes, length);
        }
    }
}

static void come_true(struct event event) {
    struct packet *packet = event.packet;
    struct member *member = &members[packet->to];
    if (event.delivered) {
        /* an interface that is down refuses it: lost like anything that comes to a dead host */
        if (write(member->fd, packet->bytes, (size_t)packet->length) < 0 && errno == EBADF) fail("write");
        free(packet);
        return;
    }
    double loss = is_arp(packet->bytes) ? 0 : member->loss;
    ns passed = pass(&member->down_free, member->down, loss, event.at, packet->length);
    if (passed < 0)
        free(packet);
    else
        push(passed, 1, packet);
}

static void set(const char *line) {
    int index;
    double up, down, delay, loss;
    long side;
    if (sscanf(line, "%d %lf %lf %lf %lf %ld", &index, &up, &down, &delay, &loss, &side) != 6 ||
        index < 0 || index >= count || up <= 0 || down <= 0) {
        errno = EINVAL;
        fail(line);
    }
    struct member *member = &members[index];
    member->up = 8000 / up;
    member->down = 8000 / down;
    member->delay = (ns)(delay * 1e6);
    member->loss = loss;
    member->side = side;
    puts("set");
    fflush(stdout);
}

static int tap(const char *name) {
    struct ifreq request = {0};
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("/dev/net/tun");
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    if (ioctl(fd, TUNSETIFF, &request) < 0) fail(name);
    return fd;
}

int main(int argc, char **argv) {
    if (argc < 4 || argc - 3 > MEMBERS) {
        fprintf(stderr, "usage: farnet QUEUE_MS SEED NAME...\n");
        return 2;
    }
    queue = (ns)(atof(argv[1]) * 1e6);
    random_state = strtoull(argv[2], NULL, 10) * 2 + 1; /* never zero */
    prctl(PR_SET_TIMERSLACK, 1);
    setpriority(PRIO_PROCESS, 0, -20); /* links do not wait for those who use them */
    struct pollfd polled[MEMBERS + 1];
    for (count = 0; count < argc - 3; count++) {
        members[count] = (struct member){.fd = tap(argv[count + 3]), .up = 1, .down = 1};
        polled[count] = (struct pollfd){.fd = members[count].fd, .events = POLLIN};
    }
    polled[count] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    puts("ready");
    fflush(stdout);

    char line[256];
    size_t length = 0;
    for (;;) {
        while (pending && heap[0].at <= now()) come_true(pop());
        ns wait = pending ? heap[0].at - now() : 1000000000;
        struct timespec limit = {0};
        if (wait > 0) limit = (struct timespec){wait / 1000000000, wait % 1000000000};
        if (ppoll(polled, (nfds_t)count + 1, &limit, NULL) < 0 && errno != EINTR) fail("ppoll");
        for (int i = 0; i < count; i++)
            if (polled[i].revents & POLLIN) take(i);
        if (!(polled[count].revents & (POLLIN | POLLHUP))) continue;
        ssize_t got = read(STDIN_FILENO, line + length, sizeof line - 1 - length);
        if (got <= 0) return 0;
        length += (size_t)got;
        for (char *end; (end = memchr(line, '\n', length));) {
            *end = 0;
            set(line);
            length -= (size_t)(end + 1 - line);
            memmove(line, end + 1, length);
        }
        if (length == sizeof line - 1) {
            errno = EINVAL;
            fail("a line that is too long");
        }
    }
}
