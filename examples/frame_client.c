/* Molecular dynamics in C with the forces of a nepserve server: 8 silicon atoms, velocity Verlet, 1 fs a step.
 *
 *     cc -O2 -o frame_client frame_client.c -lm
 *     nepserve serve nep.txt --frame-socket /tmp/frames.sock
 *     ./frame_client /tmp/frames.sock 100
 *
 * It speaks the compact frames of docs/sessions.md, on a little-endian machine. A second client would open its own
 * connection. Whatever goes wrong ends the program: no step is made with forces that did not come.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { ATOMS = 8, REQUEST = 0, RESULT = 1, ERROR = 2, OPEN = 3, OPENED = 4, CELL_FOLLOWS = 2 };

#pragma pack(push, 1)
struct head {
    char magic[4];
    uint8_t version, kind;
    uint16_t flags;
    uint32_t atoms, bytes;
    uint64_t sequence;
};
struct request { struct head head; double cell[9], positions[ATOMS][3]; };
struct result { double energy, forces[ATOMS][3]; };
#pragma pack(pop)

static void fail(const char *what)
{
    fprintf(stderr, "frame_client: %s\n", what);
    exit(1);
}

static void send_all(int s, const void *data, size_t size)
{
    for (const char *p = data; size; ) {
        ssize_t n = write(s, p, size);
        if (n <= 0) fail("the connection broke while a frame was sent");
        p += n, size -= (size_t)n;
    }
}

static void receive_all(int s, void *data, size_t size)
{
    for (char *p = data; size; ) {
        ssize_t n = read(s, p, size);
        if (n <= 0) fail("the server closed the connection");
        p += n, size -= (size_t)n;
    }
}

static struct head make_head(int kind, int flags, int atoms, size_t bytes, uint64_t sequence)
{
    struct head h = {"", 1, (uint8_t)kind, (uint16_t)flags, (uint32_t)atoms, (uint32_t)bytes, sequence};
    memcpy(h.magic, "NEPF", 4);
    return h;
}

/* The answer must be of the wanted kind and to the frame of that number; an error frame holds a JSON document. */
static void receive(int s, int kind, uint64_t sequence, void *data, size_t size)
{
    struct head h;
    receive_all(s, &h, sizeof h);
    if (memcmp(h.magic, "NEPF", 4) || h.version != 1) fail("what came is no frame");
    char *text = calloc(1, h.bytes + 1);
    if (!text) fail("no memory");
    receive_all(s, text, h.bytes);
    if (h.kind == ERROR) fail(text);
    if (h.kind != kind || h.sequence != sequence || (size && h.bytes != size)) fail("the answer is to something else");
    memcpy(data, text, size);
    free(text);
}

static double forces(int s, struct request *r, double f[ATOMS][3])
{
    struct result found;
    r->head = make_head(REQUEST, CELL_FOLLOWS, ATOMS, sizeof *r - sizeof r->head, r->head.sequence + 1);
    send_all(s, r, sizeof *r);
    receive(s, RESULT, r->head.sequence, &found, sizeof found);
    memcpy(f, found.forces, sizeof found.forces);
    return found.energy;
}

int main(int count, char **words)
{
    char *end = NULL;
    long steps = count == 3 ? strtol(words[2], &end, 10) : -1;
    if (steps < 0 || end == words[2] || *end) fail("usage: frame_client SOCKET STEPS");
    struct sockaddr_un where = {.sun_family = AF_UNIX};
    snprintf(where.sun_path, sizeof where.sun_path, "%s", words[1]);
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    if (s < 0 || connect(s, (struct sockaddr *)&where, sizeof where)) fail("nobody listens on that socket");

    /* Species are sent once; "api_key" and "model" go here, too, where the server asks for them. */
    const char *opening = "{\"symbols\": [\"Si\",\"Si\",\"Si\",\"Si\",\"Si\",\"Si\",\"Si\",\"Si\"],"
                          " \"cell\": [[5.43,0,0],[0,5.43,0],[0,0,5.43]], \"pbc\": [true,true,true]}";
    struct head h = make_head(OPEN, 0, 0, strlen(opening), 0);
    send_all(s, &h, sizeof h);
    send_all(s, opening, strlen(opening));
    receive(s, OPENED, 0, NULL, 0);

    const double a = 5.43, dt = 1.0 * 0.09822694788464063; /* 1 fs in Å·sqrt(amu/eV) */
    const double mass = 28.085;
    const double sites[ATOMS][3] = {{0, 0, 0}, {0, .5, .5}, {.5, 0, .5}, {.5, .5, 0},
                                    {.25, .25, .25}, {.25, .75, .75}, {.75, .25, .75}, {.75, .75, .25}};
    struct request r = {.cell = {a, 0, 0, 0, a, 0, 0, 0, a}};
    double v[ATOMS][3] = {{0}}, f[ATOMS][3];
    for (int i = 0; i < ATOMS; i++)
        for (int k = 0; k < 3; k++) r.positions[i][k] = a * sites[i][k] + 0.1 * sin(3.0 * i + k);

    double energy = forces(s, &r, f);
    for (long step = 0;; step++) {
        double kinetic = 0;
        for (int i = 0; i < ATOMS; i++)
            for (int k = 0; k < 3; k++) kinetic += 0.5 * mass * v[i][k] * v[i][k];
        printf("%ld %.9f %.9f\n", step, energy, energy + kinetic);
        if (step == steps) break;
        for (int i = 0; i < ATOMS; i++)
            for (int k = 0; k < 3; k++) {
                v[i][k] += 0.5 * dt * f[i][k] / mass;
                r.positions[i][k] += dt * v[i][k];
            }
        energy = forces(s, &r, f);
        for (int i = 0; i < ATOMS; i++)
            for (int k = 0; k < 3; k++) v[i][k] += 0.5 * dt * f[i][k] / mass;
    }
    close(s);
    return 0;
}
