/* The floor of streaming: accepts N connections and does nothing but call send() once per stream and step.
 *
 *   floor PORT_FILE STREAMS STEPS STEP_US EVENT_BYTES
 *
 * Each event is one HTTP chunk of EVENT_BYTES that carries the time it was made, as the real server's do.
 * Prints {"cpu_s": user + system seconds of the streaming, "tokens": N * STEPS, "wall_s": ...}.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu_s(void) {
  struct rusage r;
  getrusage(RUSAGE_SELF, &r);
  return r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) * 1e-6;
}

static void send_all(int fd, const char *data, size_t size) {
  while (size > 0) {
    ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
    if (sent <= 0) { perror("send"); exit(1); }
    data += sent;
    size -= sent;
  }
}

static void read_request(int fd) {
  char buffer[65536];
  size_t have = 0;
  while (have < sizeof buffer - 1) {
    ssize_t got = recv(fd, buffer + have, sizeof buffer - 1 - have, 0);
    if (got <= 0) { perror("recv"); exit(1); }
    have += got;
    buffer[have] = 0;
    char *end = strstr(buffer, "\r\n\r\n"), *length = strcasestr(buffer, "content-length:");
    if (end && length && have >= (size_t)(end + 4 - buffer) + strtoul(length + 15, NULL, 10)) return;
  }
  fprintf(stderr, "the request is too long\n");
  exit(1);
}

/* One chunk of exactly `size` bytes: hex length, CRLF, an event, CRLF. The padding keeps the size of real events. */
static void make_event(char *out, int size) {
  int body = size - 8;
  uint64_t stamp = (uint64_t)(now_s() * 1e4) % 10000;
  memset(out, ' ', size);
  snprintf(out, 7, "%04x\r\n", body);
  int written = snprintf(out + 6, body, "data: {\"choices\":[{\"index\":0,\"text\":\" %04u\",\"pad\":\"", (unsigned)stamp);
  memset(out + 6 + written, 'x', body - written - 6);
  memcpy(out + 6 + body - 6, "\"}]}\n\n", 6);
  memcpy(out + size - 2, "\r\n", 2);
}

int main(int argc, char **argv) {
  if (argc != 6) { fprintf(stderr, "usage: floor PORT_FILE STREAMS STEPS STEP_US EVENT_BYTES\n"); return 2; }
  int streams = atoi(argv[2]), steps = atoi(argv[3]), event_bytes = atoi(argv[5]);
  double step_s = atof(argv[4]) * 1e-6;
  if (streams < 1 || streams > 4096 || steps < 1 || event_bytes < 96 || event_bytes > 4096) return 2;
  int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  if (bind(listener, (void *)&address, length) || listen(listener, 4096)) { perror("listen"); return 1; }
  getsockname(listener, (void *)&address, &length);
  FILE *port = fopen(argv[1], "w");
  if (!port) { perror(argv[1]); return 1; }
  fprintf(port, "%d\n", ntohs(address.sin_port));
  fclose(port);
  int *fds = calloc(streams, sizeof *fds);
  static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
  static const char tail[] = "000e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
  for (int i = 0; i < streams; i++) {
    fds[i] = accept(listener, NULL, NULL);
    setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    read_request(fds[i]);
    send_all(fds[i], head, sizeof head - 1);
  }
  char *event = malloc(event_bytes + 1);
  double begin_s = now_s(), begin_cpu = cpu_s();
  for (int step = 0; step < steps; step++) {
    double wait = begin_s + step * step_s - now_s();
    if (wait > 0) {
      struct timespec pause = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
      nanosleep(&pause, NULL);
    }
    make_event(event, event_bytes);
    for (int i = 0; i < streams; i++) send_all(fds[i], event, event_bytes);
  }
  for (int i = 0; i < streams; i++) send_all(fds[i], tail, sizeof tail - 1);
  printf("{\"cpu_s\": %.6f, \"tokens\": %ld, \"wall_s\": %.6f}\n", cpu_s() - begin_cpu, (long)streams * steps,
         now_s() - begin_s);
  return 0;
}
