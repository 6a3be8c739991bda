/* Kills this process, by SIGKILL, at the k-th system call that changes files.
 *
 *   cc -shared -fPIC -O1 -o kill_at_write.so kill_at_write.c
 *   ctypes: arm(k) counts from now on, and kills at the k-th call; k < 0 only counts. num_calls() tells.
 *
 * The call at which it kills is not made; of a write half of the bytes are written. All threads are watched, and
 * whoever makes the call: libraries in Rust make some without libc, so replacing libc's functions
 * (LD_PRELOAD) would miss the rename with which safetensors ends. A seccomp filter sends SIGSYS instead, and
 * lets through what the handler itself calls, which it knows by the address. num_unseen() counts the ways of
 * writing that cannot be stopped half-way: a file mapped into memory, io_uring.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef __x86_64__
#error "written for x86-64"
#endif

/* raw_call(number, six arguments); the kernel sees the address of raw_call_end. */
long raw_call(long number, long a, long b, long c, long d, long e, long f);
extern char raw_call_end[];
__asm__(".text\n"
        "raw_call:\n"
        "  mov %rdi, %rax\n  mov %rsi, %rdi\n  mov %rdx, %rsi\n  mov %rcx, %rdx\n"
        "  mov %r8, %r10\n  mov %r9, %r8\n  mov 8(%rsp), %r9\n  syscall\n"
        "raw_call_end:\n"
        "  ret\n");

static const int WATCHED[] = {
    SYS_write,    SYS_pwrite64,  SYS_writev,          SYS_pwritev,   SYS_pwritev2,  SYS_fsync,    SYS_fdatasync,
    SYS_truncate, SYS_ftruncate, SYS_fallocate,       SYS_rename,    SYS_renameat,  SYS_renameat2, SYS_mkdir,
    SYS_mkdirat,  SYS_unlink,    SYS_unlinkat,        SYS_rmdir,     SYS_link,      SYS_linkat,   SYS_symlink,
    SYS_symlinkat, SYS_open,     SYS_openat,          SYS_creat,     SYS_sendfile,  SYS_splice,
    SYS_copy_file_range,         SYS_mmap,            SYS_io_uring_enter,
};
#define NUM_WATCHED (sizeof(WATCHED) / sizeof(WATCHED[0]))

static long kill_at, calls, unseen, is_installed;

long num_calls(void) { return __atomic_load_n(&calls, __ATOMIC_SEQ_CST); }
long num_unseen(void) { return __atomic_load_n(&unseen, __ATOMIC_SEQ_CST); }

/* Output of the program, pipes and sockets do not count. */
static int is_file(int descriptor) {
    struct stat found;
    if (descriptor == 1 || descriptor == 2) return 0;
    if (raw_call(SYS_fstat, descriptor, (long)&found, 0, 0, 0, 0)) return 0;
    return S_ISREG(found.st_mode) || S_ISDIR(found.st_mode);
}

static int changes_files(long number, const long *argument) {
    switch (number) {
        case SYS_write: case SYS_pwrite64: case SYS_writev: case SYS_pwritev: case SYS_pwritev2:
        case SYS_fsync: case SYS_fdatasync: case SYS_ftruncate: case SYS_fallocate: case SYS_sendfile:
            return is_file((int)argument[0]);
        case SYS_splice: case SYS_copy_file_range:
            return is_file((int)argument[2]);
        case SYS_open:
            return (argument[1] & (O_CREAT | O_TRUNC)) != 0;
        case SYS_openat:
            return (argument[2] & (O_CREAT | O_TRUNC)) != 0;
        case SYS_mmap: case SYS_io_uring_enter:
            return 0;
        default:
            return 1;
    }
}

static void write_half(long number, const long *argument) {
    const struct iovec *first = (const struct iovec *)argument[1];
    switch (number) {
        case SYS_write: case SYS_pwrite64:
            raw_call(number, argument[0], argument[1], argument[2] / 2, argument[3], 0, 0);
            break;
        case SYS_writev:
            raw_call(SYS_write, argument[0], (long)first->iov_base, (long)first->iov_len / 2, 0, 0, 0);
            break;
        case SYS_pwritev: case SYS_pwritev2:
            raw_call(SYS_pwrite64, argument[0], (long)first->iov_base, (long)first->iov_len / 2, argument[3], 0, 0);
            break;
    }
}

static void on_call(int signal_number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const long argument[] = {registers[REG_RDI], registers[REG_RSI], registers[REG_RDX],
                             registers[REG_R10], registers[REG_R8],  registers[REG_R9]};
    long number = info->si_syscall;
    (void)signal_number;
    if (changes_files(number, argument)) {
        if (__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) == kill_at) {
            write_half(number, argument);
            raw_call(SYS_kill, raw_call(SYS_getpid, 0, 0, 0, 0, 0, 0), SIGKILL, 0, 0, 0, 0);
            for (;;) raw_call(SYS_pause, 0, 0, 0, 0, 0, 0);
        }
    } else if (number == SYS_io_uring_enter || (number == SYS_mmap && (argument[2] & PROT_WRITE)
                                                && (argument[3] & MAP_TYPE) != MAP_PRIVATE
                                                && !(argument[3] & MAP_ANONYMOUS) && is_file((int)argument[4]))) {
        __atomic_add_fetch(&unseen, 1, __ATOMIC_SEQ_CST);
    }
    registers[REG_RAX] =
        raw_call(number, argument[0], argument[1], argument[2], argument[3], argument[4], argument[5]);
}

static long install(void) {
    struct sock_filter filter[8 + NUM_WATCHED], *next = filter;
    uint32_t low = (uint32_t)(uintptr_t)raw_call_end, high = (uint32_t)((uintptr_t)raw_call_end >> 32);
    size_t address = offsetof(struct seccomp_data, instruction_pointer);
    struct sigaction action;

    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_call;
    action.sa_flags = SA_SIGINFO;
    if (sigaction(SIGSYS, &action, NULL)) return -1;

    *next++ = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, address);
    *next++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, low, 0, 2);
    *next++ = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, address + 4);
    *next++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, high, NUM_WATCHED + 1, 0);
    *next++ = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < NUM_WATCHED; i++) /* to the trap, which stands after the last of them and the way out */
        *next++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, WATCHED[i], NUM_WATCHED - i, 0);
    *next++ = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    *next++ = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);

    struct sock_fprog program = {.len = (unsigned short)(next - filter), .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}

/* Returns 0, or -1 where the kernel has no seccomp filters. */
long arm(long k) {
    kill_at = k;
    calls = unseen = 0;
    if (!is_installed && install()) return -1;
    is_installed = 1;
    return 0;
}
