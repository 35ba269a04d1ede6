"""Which names an exported C function may have: it must compile, in C and C++, and take no other function's place."""

import re

LONGEST = 63  # characters by which C tells names apart
SUFFIXES = ("with", "INPUTS", "OUTPUTS", "SCRATCH", "SELF_TEST", "H")  # what a network's header adds to its name


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


C_KEYWORDS = _words("""
    alignas alignof asm auto bool break case char const constexpr continue default do double else enum extern false
    float for goto if inline int long nullptr register restrict return short signed sizeof static static_assert struct
    switch thread_local true typedef typeof typeof_unqual union unsigned void volatile while
""")
CPP_KEYWORDS = _words("""
    and and_eq bitand bitor catch char16_t char32_t char8_t class co_await co_return co_yield compl concept const_cast
    consteval constinit decltype delete dynamic_cast explicit export friend mutable namespace new noexcept not not_eq
    operator or or_eq private protected public reinterpret_cast requires static_cast template this throw try typeid
    typename using virtual wchar_t xor xor_eq
""")
# That compilers define, each on its system.
MACROS = _words("bsdi complex hpux i386 linux m68k mc68000 mips noreturn sgi sparc sun unix vax vms")

# Of ISO C and POSIX. A function of such a name would be called instead of theirs, by every library of the program.
# Those on numbers come in several types: sin, sinf, sinl, sinf32x.
NUMERIC = _words("""
    acos acosh asin asinh atan atan2 atanh cabs cacos cacosh canonicalize carg casin casinh catan catanh cbrt ccos
    ccosh ceil cexp cimag clog clog10 conj copysign cos cosh cpow cproj creal csin csinh csqrt ctan ctanh drem erf
    erfc exp exp10 exp2 expm1 fabs fdim finite floor fma fmax fmaximum fmaximum_mag fmaximum_mag_num fmaximum_num
    fmin fminimum fminimum_mag fminimum_mag_num fminimum_num fmod frexp fromfp fromfpx gamma hypot ilogb isinf isnan
    j0 j1 jn ldexp lgamma llogb llrint llround log log10 log1p log2 logb lrint lround modf nan nearbyint nextafter
    nextdown nexttoward nextup pow pow10 remainder remquo rint round roundeven scalb scalbln scalbn significand sin
    sincos sinh sqrt tan tanh tgamma trunc ufromfp ufromfpx y0 y1 yn
""")
LIBRARY = _words("""
    L_ctermid L_tmpnam P_tmpdir a64l abort abs accept access acct adjtime aio_cancel aio_error aio_fsync aio_read
    aio_return aio_suspend aio_write alarm aligned_alloc alloca alphasort arc4random arc4random_buf
    arc4random_uniform asctime assert at_quick_exit atexit atof atoi atol atoll basename bcmp bcopy be16toh be32toh
    be64toh bind bindresvport bindresvport6 brk bsearch btowc bzero c16rtomb c32rtomb c8rtomb call_once calloc
    catclose catgets catopen cfgetispeed cfgetospeed cfmakeraw cfsetispeed cfsetospeed cfsetspeed chdir chmod chown
    chroot clearenv clearerr clock clock_getcpuclockid clock_getres clock_gettime clock_nanosleep clock_settime
    close closedir closefrom closelog cnd_broadcast cnd_destroy cnd_init cnd_signal cnd_timedwait cnd_wait confstr
    connect creat crypt ctermid ctime daddl daemon daylight dcgettext dcngettext ddivl dfmal dgettext difftime dirfd
    dirname div dlclose dlerror dlopen dlsym dmull dngettext dprintf drand48 dsqrtl dsubl dup dup2 duplocale dysize
    ecvt endgrent endhostent endnetent endnetgrent endprotoent endpwent endrpcent endservent endusershell environ
    erand48 errno execl execle execlp execv execve execvp exit explicit_bzero faccessat fadd faddl fchdir fchmod
    fchmodat fchown fchownat fclose fcntl fcvt fd_mask fd_set fdatasync fdiv fdivl fdopen fdopendir feclearexcept
    fegetenv fegetexceptflag fegetmode fegetround feholdexcept feof feraiseexcept ferror fesetenv fesetexcept
    fesetexceptflag fesetmode fesetround fetestexcept fetestexceptflag feupdateenv fexecve fflush ffma ffmal ffs
    ffsl ffsll fgetc fgetgrent fgetpos fgetpwent fgets fgetwc fgetws fileno flockfile fmemopen fmul fmull fnmatch
    fopen fork fpathconf fpclassify fprintf fputc fputs fputwc fputws fread free freeaddrinfo freelocale freopen
    fscanf fseek fseeko fsetpos fsqrt fsqrtl fstat fstatat fstatvfs fsub fsubl fsync ftell ftello ftok ftruncate
    ftrylockfile ftw funlockfile futimens futimes fwide fwprintf fwrite fwscanf gai_strerror gcvt getaddrinfo getc
    getchar getcwd getdate getdelim getdirentries getdomainname getdtablesize getegid getentropy getenv geteuid
    getgid getgrent getgrgid getgrnam getgrouplist getgroups gethostbyaddr gethostbyname gethostbyname2 gethostent
    gethostid gethostname getitimer getline getloadavg getlogin getnameinfo getnetbyaddr getnetbyname getnetent
    getnetgrent getopt getpagesize getpass getpeername getpgid getpgrp getpid getppid getpriority getprotobyname
    getprotobynumber getprotoent getpwent getpwnam getpwuid getrlimit getrpcbyname getrpcbynumber getrpcent
    getrusage gets getservbyname getservbyport getservent getsid getsockname getsockopt getsubopt gettext
    gettimeofday getuid getusershell getw getwc getwchar getwd glob globfree gmtime grantpt gsignal h_errno hcreate
    hdestroy herror hsearch hstrerror htobe16 htobe32 htobe64 htole16 htole32 htole64 htonl htons iconv iconv_close
    iconv_open if_freenameindex if_indextoname if_nameindex if_nametoindex imaxabs imaxdiv index inet_addr inet_aton
    inet_lnaof inet_makeaddr inet_net_ntop inet_net_pton inet_neta inet_netof inet_network inet_nsap_addr
    inet_nsap_ntoa inet_ntoa inet_ntop inet_pton initgroups initstate innetgr insque iruserok iruserok_af isalnum
    isalpha isascii isatty isblank iscanonical iscntrl isdigit iseqsig isfdtype isfinite isgraph isgreater
    isgreaterequal isless islessequal islessgreater islower isnormal isprint ispunct issignaling isspace issubnormal
    isunordered isupper iswalnum iswalpha iswblank iswcntrl iswctype iswdigit iswgraph iswlower iswprint iswpunct
    iswspace iswupper iswxdigit isxdigit iszero jrand48 kill kill_dependency killpg l64a labs lchmod lchown lcong48
    ldiv le16toh le32toh le64toh lfind link linkat lio_listio listen llabs lldiv localeconv localtime lockf longjmp
    lrand48 lsearch lseek lstat lutimes madvise main malloc math_errhandling mblen mbrlen mbrtoc16 mbrtoc32 mbrtoc8
    mbrtowc mbsinit mbsnrtowcs mbsrtowcs mbstowcs mbtowc memccpy memchr memcmp memcpy memmove memory_order mempcpy
    memset mincore mkdir mkdirat mkdtemp mkfifo mkfifoat mknod mknodat mkstemp mkstemps mktemp mktime mlock mlockall
    mmap mprotect mq_close mq_getattr mq_notify mq_open mq_receive mq_send mq_setattr mq_timedreceive mq_timedsend
    mq_unlink mrand48 msgctl msgget msgrcv msgsnd msync mtx_destroy mtx_init mtx_lock mtx_timedlock mtx_trylock
    mtx_unlock munlock munlockall munmap nanosleep newlocale nftw ngettext nice nl_catd nl_item nl_langinfo nrand48
    ntohl ntohs offsetof on_exit once_flag open open_memstream open_wmemstream openat opendir openlog optarg opterr
    optind optopt pathconf pause pclose perror pipe poll popen pread preadv printf profil pselect psiginfo psignal
    ptsname putc putchar putenv putpwent puts putw putwc putwchar pwrite pwritev qecvt qfcvt qgcvt qsort quick_exit
    raise rand random rcmd rcmd_af read readdir readlink readlinkat readv realloc reallocarray realpath recv
    recvfrom recvmsg regcomp regerror regexec regfree remove remque rename renameat revoke rewind rewinddir rexec
    rexec_af rindex rmdir rpmatch rresvport rresvport_af ruserok ruserok_af sbrk scandir scanf
    sched_get_priority_max sched_get_priority_min sched_getparam sched_getscheduler sched_rr_get_interval
    sched_setparam sched_setscheduler sched_yield seed48 seekdir select sem_close sem_destroy sem_getvalue sem_init
    sem_open sem_post sem_timedwait sem_trywait sem_unlink sem_wait semctl semget semop send sendmsg sendto setbuf
    setbuffer setdomainname setegid setenv seteuid setgid setgrent setgroups sethostent sethostid sethostname
    setitimer setjmp setlinebuf setlocale setlogin setlogmask setnetent setnetgrent setpgid setpgrp setpriority
    setprotoent setpwent setregid setreuid setrlimit setrpcent setservent setsid setsockopt setstate settimeofday
    setuid setusershell setvbuf shm_open shm_unlink shmat shmctl shmdt shmget shutdown sigaction sigaddset
    sigaltstack sigblock sigdelset sigemptyset sigfillset siggetmask sighold sigignore siginterrupt sigismember
    siglongjmp sigmask signal signbit signgam sigpause sigpending sigprocmask sigqueue sigrelse sigreturn sigset
    sigsetjmp sigsetmask sigstack sigsuspend sigtimedwait sigwait sigwaitinfo sleep snprintf sockatmark socket
    socketpair sprintf srand srand48 srandom sscanf ssignal stat statvfs stderr stdin stdout stpcpy stpncpy
    strcasecmp strcat strchr strcmp strcoll strcpy strcspn strdup strerror strfmon strfromd strfromf strfroml
    strftime strlen strncasecmp strncat strncmp strncpy strndup strnlen strpbrk strptime strrchr strsep strsignal
    strspn strstr strtod strtof strtoimax strtok strtol strtold strtoll strtoq strtoul strtoull strtoumax strtouq
    strxfrm swab swprintf swscanf symlink symlinkat sync syscall sysconf syslog system tcdrain tcflow tcflush
    tcgetattr tcgetpgrp tcgetsid tcsendbreak tcsetattr tcsetpgrp tdelete telldir tempnam tfind thrd_create
    thrd_current thrd_detach thrd_equal thrd_exit thrd_join thrd_sleep thrd_yield time timegm timelocal timer_create
    timer_delete timer_getoverrun timer_gettime timer_settime timeradd timerclear timercmp timerisset timersub times
    timespec_get timespec_getres timezone tmpfile tmpnam toascii tolower toupper towctrans towlower towupper
    truncate tsearch tss_create tss_delete tss_get tss_set ttyname ttyslot twalk tzname tzset u_char u_int u_long
    u_short ualarm uint ulong umask uname ungetc ungetwc unlink unlinkat unlockpt unsetenv uselocale ushort usleep
    utime utimensat utimes valloc vdprintf vfork vfprintf vfscanf vfwprintf vfwscanf vhangup vprintf vscanf
    vsnprintf vsprintf vsscanf vswprintf vswscanf vsyslog vwprintf vwscanf wait wait3 wait4 waitid waitpid wcpcpy
    wcpncpy wcrtomb wcscasecmp wcscat wcschr wcscmp wcscoll wcscpy wcscspn wcsdup wcsftime wcslen wcsncasecmp
    wcsncat wcsncmp wcsncpy wcsnlen wcsnrtombs wcspbrk wcsrchr wcsrtombs wcsspn wcsstr wcstod wcstof wcstoimax
    wcstok wcstol wcstold wcstoll wcstombs wcstoul wcstoull wcstoumax wcswcs wcswidth wcsxfrm wctob wctomb wctrans
    wctype wcwidth wmemchr wmemcmp wmemcpy wmemmove wmemset wordexp wordfree wprintf write writev wscanf
""")
# Beginnings that are theirs whatever follows; va because of va_copy.
FAMILIES = _words("atomic posix pthread va")


# The network's own header would be read in place of these.
HEADERS = _words("""
    assert complex cpuid ctype errno fcntl features fenv float immintrin inttypes iso646 limits locale malloc math
    memory poll pthread sched semaphore setjmp signal stdalign stdarg stdatomic stdbit stdbool stdckdint stddef stdint
    stdio stdlib stdnoreturn string strings tgmath threads time uchar unistd wchar wctype
""")


def why_not(name: str) -> str | None:
    """What is wrong with this name for an exported function; None if it can be used."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        return "a name in C has letters, digits and _, and begins with a letter"
    if len(name) > LONGEST:
        return f"it has {len(name)} characters, and C tells names apart by {LONGEST}"
    if name[0] == "_" or name[-1] == "_" or "__" in name:
        return "names with a _ at an end or two in a row belong to the compiler"
    if name in C_KEYWORDS:
        return f"{name} is a keyword of C"
    if name in CPP_KEYWORDS:
        return f"{name} is a keyword of C++, where the header could not be used"
    if name in MACROS:
        return f"{name} is a macro of some compilers"
    if not re.search("[a-z]", name):
        return "names without a small letter are macros in C"
    if name.endswith("_t"):
        return "names that end with _t are types in C"
    if _in_library(name):
        return f"{name} belongs to the library of C"
    if name in HEADERS:
        return f"{name}.h is a header of C, in whose place this one would be read"
    for suffix in SUFFIXES:
        if name.endswith(f"_{suffix}"):
            return f"the header of a network {name.removesuffix(f'_{suffix}')} would define {name} too"
    return None


def _in_library(name: str) -> bool:
    plain = re.sub("(_l|_r|_unlocked)$", "", name)  # also for a locale, for threads
    number = re.sub(r"(f|l|f\d+x?|d\d+)$", "", plain)
    return plain in LIBRARY | NUMERIC or number in NUMERIC or name.split("_")[0] in FAMILIES


def suggestion(name: str) -> str:
    """A name like this one that can be used."""
    words = re.sub(r"[^A-Za-z0-9]+", "_", name)[: LONGEST - len("net__net")].strip("_")
    if not re.search("[a-z]", words):
        words = words.lower()
    candidates = [words, f"{words}_net", f"net_{words}", f"net_{words}_net"] if words else ["net"]
    return next(candidate for candidate in candidates if why_not(candidate) is None)
