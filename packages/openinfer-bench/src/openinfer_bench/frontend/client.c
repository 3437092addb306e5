/* A client that costs as little as possible: N streaming requests at once through epoll.
 *
 *   client PORT STREAMS REQUEST_FILE
 *
 * Sends the file's bytes on each connection, counts the SSE events of each answer (without [DONE]) and reads each event's text, four
 * digits: the time the engine made it, in 0.1 ms modulo 1 s. Lag is the time from there to here.
 * Prints {"tokens":, "finished":, "bytes":, "wall_s":, "lag_ms": {"p50":, "p99":, "max":}}.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 16, LAGS = 10000 };
static long lags[LAGS], tokens, total_bytes, finished;

struct stream {
  int fd, done;
  size_t have;
  char data[BUFFER + 1];
};

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Takes whole lines; an event's line begins with "data: ". */
static void scan(struct stream *s) {
  long now = (long)(now_s() * 1e4) % LAGS;
  char *line = s->data, *end;
  while ((end = memchr(line, '\n', s->data + s->have - line))) {
    *end = 0;
    if (!strncmp(line, "data: [DONE]", 12)) {
      s->done = 1;
    } else if (!strncmp(line, "data: ", 6)) {
      char *text = strstr(line, "\":\" "); /* the one string of an event that begins with a space */
      if (text) {
        tokens++;
        for (char *at = text + 3; *at == ' '; at += 5) { /* several tokens may share one event */
          lags[(now - atol(at + 1) + LAGS) % LAGS]++;
          if (at[5] == ' ') tokens++;
        }
      }
    }
    line = end + 1;
  }
  s->have -= line - s->data;
  memmove(s->data, line, s->have);
  if (s->have == BUFFER) { fprintf(stderr, "a line exceeds %d bytes\n", BUFFER); exit(1); }
}

static double percentile(double share) {
  long all = 0, sum = 0, i = 0;
  for (int k = 0; k < LAGS; k++) all += lags[k];
  for (; i < LAGS && (sum += lags[i]) < share * all; i++) {}
  return i / 10.0;
}

int main(int argc, char **argv) {
  if (argc != 4) { fprintf(stderr, "usage: client PORT STREAMS REQUEST_FILE\n"); return 2; }
  int count = atoi(argv[2]);
  static char request[1 << 20];
  FILE *file = fopen(argv[3], "rb");
  if (!file) { perror(argv[3]); return 1; }
  size_t request_bytes = fread(request, 1, sizeof request, file);
  fclose(file);
  struct sockaddr_in address = {
      .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(atoi(argv[1]))};
  struct stream *streams = calloc(count, sizeof *streams);
  int poll = epoll_create1(0);
  double begin_s = now_s();
  for (int i = 0; i < count; i++) {
    struct stream *s = &streams[i];
    s->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(s->fd, (void *)&address, sizeof address)) { perror("connect"); return 1; }
    if (send(s->fd, request, request_bytes, MSG_NOSIGNAL) != (ssize_t)request_bytes) { perror("send"); return 1; }
    fcntl(s->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
    epoll_ctl(poll, EPOLL_CTL_ADD, s->fd, &event);
  }
  for (int open = count; open > 0;) {
    struct epoll_event events[256];
    int ready = epoll_wait(poll, events, 256, 60000);
    if (ready == 0) { fprintf(stderr, "nothing arrived for 60 s\n"); return 1; }
    for (int i = 0; i < ready; i++) {
      struct stream *s = events[i].data.ptr;
      ssize_t got = recv(s->fd, s->data + s->have, BUFFER - s->have, 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got > 0) {
        s->have += got;
        total_bytes += got;
        scan(s);
      }
      if (got <= 0 || s->done) {
        finished += s->done;
        epoll_ctl(poll, EPOLL_CTL_DEL, s->fd, NULL);
        close(s->fd);
        open--;
      }
    }
  }
  printf("{\"tokens\": %ld, \"finished\": %ld, \"bytes\": %ld, \"wall_s\": %.6f, "
         "\"lag_ms\": {\"p50\": %.1f, \"p99\": %.1f, \"max\": %.1f}}\n",
         tokens, finished, total_bytes, now_s() - begin_s, percentile(0.5), percentile(0.99), percentile(1.0));
  return 0;
}
