package cniclient

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const tree = "../.."

// build builds the plugin as `make build` does, with GOFLAGS as a distribution may set them. If path is not empty, the
// plugin is written to path, with link as its linker flags.
func build(path, link string, env ...string) error {
	args := []string{"-C", tree, "plugin"}
	if path != "" {
		args = append(args, "plugin="+path, "plugin_link="+link)
	}
	cmd := exec.Command("make", args...)
	cmd.Env = append(append(os.Environ(), "GOFLAGS="+os.Getenv("GOFLAGS")+" -buildmode=pie"), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make plugin: %w\n%s", err, out)
	}
	return nil
}

// plain builds the plugin with Go's runtime.
func plain(path, link string) error {
	cmd := exec.Command("go", "build", "-ldflags", link, "-o", path, tree+"/cmd/pilaster-cni")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// both returns two plugins: one without Go's runtime, as it is installed, and one with it.
var both = sync.OnceValues(func() ([]string, error) {
	dir, err := os.MkdirTemp("", "pilaster-plugin-")
	if err != nil {
		return nil, err
	}
	with := filepath.Join(dir, "pilaster-cni")
	return []string{tree + "/bin/pilaster-cni", with}, errors.Join(build("", ""), plain(with, ""))
})

func TestMain(m *testing.M) {
	code := m.Run()
	if binaries, _ := both(); binaries != nil {
		os.RemoveAll(filepath.Dir(binaries[1]))
	}
	os.Exit(code)
}

// start starts a binary and returns as soon as it waits for its standard input.
func start(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		if strings.Contains(string(stat), ") S ") {
			return
		}
		if err != nil || strings.Contains(string(stat), ") Z ") || time.Now().After(deadline) {
			cmd.Process.Kill()
			t.Fatalf("%s does not wait for its standard input: %v, %q, %v", cmd.Path, err, stat, cmd.Wait())
		}
	}
}

// TestNoRuntime: the installed plugin has one thread, whereas Go's runtime starts more before main. It is not a PIE,
// which would need relocation.
func TestNoRuntime(t *testing.T) {
	binaries, err := both()
	if err != nil {
		t.Fatal(err)
	}
	file, err := elf.Open(binaries[0])
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if file.Type != elf.ET_EXEC {
		t.Errorf("%s has type %v, want %v", binaries[0], file.Type, elf.ET_EXEC)
	}
	for i, binary := range binaries {
		cmd := exec.Command(binary)
		cmd.Env = []string{"CNI_COMMAND=ADD"}
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		start(t, cmd)
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", cmd.Process.Pid))
		stdin.Close()
		cmd.Wait()
		if err != nil || (len(threads) == 1) != (i == 0 && runtime.GOARCH == "amd64") {
			t.Errorf("%s has %d threads, %v; want 1 without Go's runtime, more with it", binary, len(threads), err)
		}
	}
}

var (
	function = regexp.MustCompile(`^TEXT (\S+)\(SB\)`)
	callee   = regexp.MustCompile(`\t(?:CALL|JMP) (\S+)\(SB\)`)
	// Functions of the runtime that need no initialization: they copy, compare and decode, or report a fatal error.
	harmless = regexp.MustCompile(`^runtime\.(mem(move|equal|clrNoHeapPointers)\w*|(gop|p)anic\w*|morestack\w*|` +
		`decoderune|duff(zero|copy))(\.abi0)?$`)
)

// TestAllocatesNothing checks every function that main.begin calls, directly or not, in the installed plugin: without
// Go's runtime there is no heap.
func TestAllocatesNothing(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "pilaster-cni")
	if err := build(binary, "", "GOARCH=amd64"); err != nil { // as installed, but with symbols
		t.Fatal(err)
	}
	text, err := exec.Command("go", "tool", "objdump", binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	calls, in := map[string][]string{}, ""
	for line := range strings.Lines(string(text)) {
		if m := function.FindStringSubmatch(line); m != nil {
			in = m[1]
			calls[in] = []string{}
		} else if m := callee.FindStringSubmatch(line); m != nil {
			calls[in] = append(calls[in], m[1])
		}
	}
	excused := []string{
		"main.begin runtime.gcWriteBarrier1", // called only while the garbage collector runs
		// Only for numbers without a text, for which describe does not call Error: see TestDescribe.
		"syscall.Errno.Error runtime.concatstring2", "syscall.Errno.Error internal/strconv.FormatInt",
	}
	seen, next := map[string]bool{}, []string{"main.begin", "syscall.RawSyscall6"}
	for len(next) > 0 {
		name := next[0]
		next = next[1:]
		if seen[name] {
			continue
		}
		seen[name] = true
		if calls[name] == nil {
			t.Errorf("called function %s is not in the binary", name)
		}
		for _, to := range calls[name] {
			switch {
			case harmless.MatchString(to), slices.Contains(excused, name+" "+to):
			case strings.HasPrefix(to, "runtime."):
				t.Errorf("%s calls %s, which needs Go's runtime", name, to)
			default:
				next = append(next, to)
			}
		}
	}
	for _, name := range []string{"Run", "refusal", "exchange", "read"} {
		if !seen["pilaster.io/pilaster/internal/cniclient.(*Call)."+name] {
			t.Errorf("%s is not among the %d functions that main.begin calls", name, len(seen))
		}
	}
}

func TestDescribe(t *testing.T) {
	c := &Call{}
	for n := syscall.Errno(1); n < 4096; n++ {
		var got string
		if allocations := testing.AllocsPerRun(1, func() { got = c.describe(n) }); allocations > 0 ||
			got != n.Error() && n != syscall.ETIMEDOUT {
			t.Errorf("errno %d: got %q with %v allocations, want %q with none", n, got, allocations, n.Error())
		}
	}
}

// The plugin waits for its timeout, and no longer, if the agent does not answer or its socket's queue is full. Signals
// do not change that.
func TestTimeout(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const link, seconds = "-X pilaster.io/pilaster/internal/cniclient.timeout=1", time.Second
	dir := t.TempDir()
	without, with := filepath.Join(dir, "without"), filepath.Join(dir, "with")
	if err := errors.Join(build(without, link), plain(with, link)); err != nil {
		t.Fatal(err)
	}
	silent := filepath.Join(dir, "silent")
	l, err := net.Listen("unix", silent)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, c := range []struct{ binary, socket, at string }{
		{without, silent, "read"}, {with, silent, "read"}, {without, fullSocket(t), "connect"},
		{with, fullSocket(t), "connect"},
	} {
		var out strings.Builder
		cmd := exec.Command(c.binary)
		cmd.Env, cmd.Stdout = []string{"CNI_COMMAND=ADD"}, &out
		cmd.Stdin = strings.NewReader(config(c.socket))
		began := time.Now()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() { defer close(ended); cmd.Wait() }()
		for waiting := true; waiting; {
			select {
			case <-ended:
				waiting = false
			case <-time.After(10 * time.Millisecond):
				for _, s := range []os.Signal{syscall.SIGURG, syscall.SIGSTOP, syscall.SIGCONT} {
					cmd.Process.Signal(s)
				}
				if time.Since(began) > 20*time.Second {
					cmd.Process.Kill()
				}
			}
		}
		// connect tries again after each pause, and gives up when less than one pause is left.
		if took := time.Since(began); took < seconds-pause*time.Nanosecond || cmd.ProcessState.ExitCode() != 1 ||
			!strings.Contains(out.String(), `"code":11,`) ||
			!strings.Contains(out.String(), "does not answer: "+c.at+": timeout after 1 seconds") {
			t.Errorf("%s: %v after %v, printed %q", c.binary, cmd.ProcessState, took, out.String())
		}
	}
}

// fullSocket returns a socket with a full queue of connections.
func fullSocket(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "s")
	socket := func() int {
		s, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { syscall.Close(s) })
		return s
	}
	l, address := socket(), &syscall.SockaddrUnix{Name: path}
	if err := errors.Join(syscall.Bind(l, address), syscall.Listen(l, 0)); err != nil {
		t.Fatal(err)
	}
	for {
		switch err := syscall.Connect(socket(), address); err {
		case nil:
		case syscall.EAGAIN:
			return path
		default:
			t.Fatal(err)
		}
	}
}

// A runtime may pass non-blocking files.
func TestNonBlockingFiles(t *testing.T) {
	binaries, err := both()
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 300_000) // longer than a pipe's buffer
	socket := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Pilaster-Exit", "0")
		io.WriteString(w, long)
	}))
	for _, binary := range binaries {
		var stdin, stdout [2]int
		if err := errors.Join(syscall.Pipe2(stdin[:], syscall.O_NONBLOCK|syscall.O_CLOEXEC),
			syscall.Pipe2(stdout[:], syscall.O_NONBLOCK|syscall.O_CLOEXEC)); err != nil {
			t.Fatal(err)
		}
		in, inEnd := os.NewFile(uintptr(stdin[0]), "in"), os.NewFile(uintptr(stdin[1]), "in")
		outEnd, out := os.NewFile(uintptr(stdout[0]), "out"), os.NewFile(uintptr(stdout[1]), "out")
		page := strings.Repeat("-", 65536)
		if n, err := syscall.Write(stdout[1], []byte(page)); n != len(page) || err != nil { // fills the pipe
			t.Fatalf("wrote %d bytes to a pipe, want %d: %v", n, len(page), err)
		}
		cmd := exec.Command(binary)
		cmd.Env, cmd.Stdin, cmd.Stdout = []string{"CNI_COMMAND=ADD"}, in, out
		start(t, cmd)
		in.Close()
		out.Close()
		io.WriteString(inEnd, config(socket))
		inEnd.Close()
		time.Sleep(50 * time.Millisecond) // a plugin that does not wait for room in the pipe fails meanwhile
		got, err := io.ReadAll(outEnd)
		outEnd.Close()
		if failed := cmd.Wait(); failed != nil || err != nil || string(got) != page+long {
			t.Errorf("%s: %v, %v; got %d bytes of %d: %.100q", binary, failed, err, len(got), len(page+long), got)
		}
	}
}
