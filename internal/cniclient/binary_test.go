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

// build makes the plugin as `make build` does, whatever GOFLAGS a distribution sets, with other words to the linker.
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

// plain builds it with Go's runtime.
func plain(path, link string) error {
	cmd := exec.Command("go", "build", "-ldflags", link, "-o", path, tree+"/cmd/pilaster-cni")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// both are the plugin as it is installed, without Go's runtime, and with it.
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

// start starts a binary that waits for its standard input, or fails if it ends.
func start(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		said, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		if strings.Contains(string(said), ") S ") {
			return
		}
		if err != nil || strings.Contains(string(said), ") Z ") || time.Now().After(deadline) {
			cmd.Process.Kill()
			t.Fatalf("%s does not wait for its standard input: %v, %q, %v", cmd.Path, err, said, cmd.Wait())
		}
	}
}

// TestNoRuntime: what is installed has one thread, where Go's runtime has more before main begins; and it is in its
// place without a dynamic linker.
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
		t.Errorf("%s is %v", binaries[0], file.Type)
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
			t.Errorf("%s has %d threads, %v", binary, len(threads), err)
		}
	}
}

var (
	function = regexp.MustCompile(`^TEXT (\S+)\(SB\)`)
	callee   = regexp.MustCompile(`\t(?:CALL|JMP) (\S+)\(SB\)`)
	// Of the runtime only what needs none of it: what copies, compares and decodes, and what is called where a program
	// dies.
	harmless = regexp.MustCompile(
		`^runtime\.(mem(move|equal|clrNoHeapPointers)\w*|(gop|p)anic\w*|morestack\w*|decoderune|duff(zero|copy))(\.abi0)?$`,
	)
)

// TestAllocatesNothing walks through all that begin calls in what is installed. Without Go's runtime there is no heap.
func TestAllocatesNothing(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "pilaster-cni")
	if err := build(binary, "", "GOARCH=amd64"); err != nil { // as installed, but its functions have names
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
		"main.begin runtime.gcWriteBarrier1", // only where a collector has set a flag
		// For numbers that are not in its table; TestDescribe shows that it is not asked for those.
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
			t.Errorf("%s is called, and is not in the binary", name)
		}
		for _, to := range calls[name] {
			switch {
			case harmless.MatchString(to), slices.Contains(excused, name+" "+to):
			case strings.HasPrefix(to, "runtime."):
				t.Errorf("%s calls %s", name, to)
			default:
				next = append(next, to)
			}
		}
	}
	for _, name := range []string{"Run", "refusal", "exchange", "read"} {
		if !seen["pilaster.io/pilaster/internal/cniclient.(*Call)."+name] {
			t.Errorf("%s was not looked at, of %d functions", name, len(seen))
		}
	}
}

func TestDescribe(t *testing.T) {
	c := &Call{}
	for n := syscall.Errno(1); n < 4096; n++ {
		var got string
		if took := testing.AllocsPerRun(1, func() { got = c.describe(n) }); took > 0 ||
			got != n.Error() && n != syscall.ETIMEDOUT {
			t.Errorf("%d is %q and takes memory %v times; Go says %q", n, got, took, n.Error())
		}
	}
}

// An agent that takes a call and never answers, or has no room for one, is waited for as long as is said, however many
// signals come meanwhile.
func TestPatience(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const link, seconds = "-X pilaster.io/pilaster/internal/cniclient.patience=1", time.Second
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
		{without, silent, "read"}, {with, silent, "read"}, {without, crowded(t), "connect"},
		{with, crowded(t), "connect"},
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
		// connect tries every pause, and gives up when less than one more is left.
		if took := time.Since(began); took < seconds-pause*time.Nanosecond || cmd.ProcessState.ExitCode() != 1 ||
			!strings.Contains(out.String(), `"code":11,`) ||
			!strings.Contains(out.String(), "does not answer: "+c.at+": nothing came for 1 seconds") {
			t.Errorf("%s: %v after %v, said %q", c.binary, cmd.ProcessState, took, out.String())
		}
	}
}

// crowded is a socket where as many wait already as may.
func crowded(t *testing.T) string {
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

// A runtime may give files that do not block.
func TestFilesThatDoNotBlock(t *testing.T) {
	binaries, err := both()
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 300_000) // is more than a pipe takes
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
		if n, err := syscall.Write(stdout[1], []byte(page)); n != len(page) || err != nil { // so that it is full
			t.Fatalf("%d bytes filled a pipe: %v", n, err)
		}
		cmd := exec.Command(binary)
		cmd.Env, cmd.Stdin, cmd.Stdout = []string{"CNI_COMMAND=ADD"}, in, out
		start(t, cmd)
		in.Close()
		out.Close()
		io.WriteString(inEnd, config(socket))
		inEnd.Close()
		time.Sleep(50 * time.Millisecond) // for what does not wait for room in a full pipe to show it
		got, err := io.ReadAll(outEnd)
		outEnd.Close()
		if failed := cmd.Wait(); failed != nil || err != nil || string(got) != page+long {
			t.Errorf("%s: %v, %v; of %d bytes %d came: %.100q", binary, failed, err, len(page+long), len(got), got)
		}
	}
}
