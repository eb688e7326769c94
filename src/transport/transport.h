/* SPDX-License-Identifier: Apache-2.0 */
/* transport: moves bytes between two ends and knows no model.
 *
 * A transport is one end of a connected, ordered, reliable, full-duplex byte stream. Nothing here
 * blocks besides connect: send and recv move what can be moved now, and transport_poll says what to
 * wait for. The end of the stream, in any form, is BATON_ERR_PEER; after it the object only closes,
 * besides that a failed send leaves readable what has already arrived. Nothing is lost by a peer's
 * close: recv reports the end after the last byte was read. One thread at a time for each end; the
 * two ends of one process may be used by two threads.
 */
#ifndef TRANSPORT_TRANSPORT_H
#define TRANSPORT_TRANSPORT_H

#include <baton/device.h>

struct iovec;
struct pollfd;
struct transport;

/* Two ends in one process: the reference, and what tests use. `capacity` bytes each way. */
int transport_inproc_pair(size_t capacity, struct transport **a, struct transport **b,
                          struct baton_error *e);
/* Wrap a connected stream socket (Unix or TCP); owns fd on success. Makes it non-blocking and
 * close-on-exec; anything else is BATON_ERR_USAGE. After a fork one process alone uses it. */
int transport_fd_open(int fd, struct transport **out, struct baton_error *e);
/* A connected pair of Unix sockets as plain descriptors (close-on-exec), to be kept across fork. */
int transport_socketpair(int fds[2], struct baton_error *e);
/* The same over TCP on the loopback interface. */
int transport_tcp_pair(int fds[2], struct baton_error *e);

/* "HOST:PORT" (TCP, IPv6 in brackets) or "unix:PATH". Listening on port 0 picks one. An address
 * that does not parse or resolve is BATON_ERR_USAGE that names it; resolving a name may block. */
struct transport_listener;
int transport_listen(const char *address, struct transport_listener **out, struct baton_error *e);
void transport_listener_close(struct transport_listener *l); /* NULL is fine; unlinks its path */
int transport_listener_fd(const struct transport_listener *l);
/* The address with the port that was bound. */
const char *transport_listener_address(const struct transport_listener *l);
/* Only processes of this machine can connect: a Unix socket, or bound to a loopback address. */
bool transport_listener_local(const struct transport_listener *l);
/* BATON_ERR_BUSY when nobody waits. */
int transport_accept(struct transport_listener *l, struct transport **out, struct baton_error *e);
/* The only call that waits: at most timeout_ns, then BATON_ERR_TIMEOUT. Nobody listens:
 * BATON_ERR_IO at once. */
int transport_connect(const char *address, uint64_t timeout_ns, struct transport **out,
                      struct baton_error *e);

void transport_close(struct transport *t); /* NULL is fine */
/* Move what can be moved now; *moved may be 0. */
int transport_send(struct transport *t, const struct iovec *iov, int n_iov, size_t *moved,
                   struct baton_error *e);
int transport_recv(struct transport *t, void *buf, size_t n, size_t *moved, struct baton_error *e);
/* Descriptors to poll for "something to read" and, with want_write, "room to write": fills at most
 * 2, returns how many. Level-triggered; the end of the stream counts as both. Any event in any of
 * them means: try (room to write may show as POLLIN of a descriptor of its own). */
int transport_poll(struct transport *t, bool want_write, struct pollfd *fds);

/* Descriptors travel with bytes where both ends are Unix sockets. false: not over this one. With
 * `receive` the end takes them from here on; one that never asked drops those that come. */
bool transport_passes_fds(struct transport *t, bool receive);
/* transport_send that lets `fd` (still the caller's) arrive with the first of the bytes; it went if
 * and only if *moved > 0. */
int transport_send_fd(struct transport *t, const struct iovec *iov, int n_iov, int fd,
                      size_t *moved, struct baton_error *e);
/* The descriptor that came with bytes received so far, the caller's from now on; -1: none. It is
 * there once the first byte that it was sent with has been received. A second one that comes
 * before the first was taken is BATON_ERR_INTEGRITY of transport_recv, and the end. */
int transport_take_fd(struct transport *t);

/* A landing region: memory without a name that one process lends to one other, which gets it as a
 * descriptor. Sealed: its size never changes, so touching it is safe whatever the other side does.
 * What lies in it may change at any time while the other side has it. */
struct transport_landing;
/* Zeroed, and backed by memory as a whole: BATON_ERR_NOMEM where there is not so much. */
int transport_landing_create(size_t bytes, struct transport_landing **out, struct baton_error *e);
/* Map a region that was lent. `fd` is closed in every case. Anything but a sealed memory file of
 * exactly `bytes` is BATON_ERR_PEER. */
int transport_landing_map(int fd, size_t bytes, struct transport_landing **out,
                          struct baton_error *e);
/* Unmaps it here; the other side's mapping then is memory that nobody reads. NULL is fine. */
void transport_landing_close(struct transport_landing *l);
uint8_t *transport_landing_data(const struct transport_landing *l);
/* What is to be sent; -1 once it was let go (the mapping stays), and at the borrower. */
int transport_landing_fd(const struct transport_landing *l);
void transport_landing_sent(struct transport_landing *l);

/* A transport that misbehaves on purpose around another (owned on success): for tests. The fault
 * sets in once `at_byte` bytes have been sent through it; `seed` decides what is left to chance. */
enum transport_fault {
    TRANSPORT_FAULT_SHORT = 1, /* send and recv move fewer bytes than they could: always legal */
    TRANSPORT_FAULT_FLIP = 2,  /* one bit of the byte number at_byte (from 0) differs */
    TRANSPORT_FAULT_CUT = 3,   /* the stream ends, for both sides, at the next send */
    TRANSPORT_FAULT_STALL = 4, /* moves nothing in either direction from then on */
};
int transport_faulty_open(struct transport *inner, enum transport_fault kind, uint64_t at_byte,
                          uint64_t seed, struct transport **out, struct baton_error *e);

#endif
