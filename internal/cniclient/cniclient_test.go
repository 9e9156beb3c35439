package cniclient

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"pilaster.io/pilaster/internal/cniserver"
	"pilaster.io/pilaster/internal/unixrpc"
)

// serve answers on a socket with h and returns its path.
func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := unixrpc.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	server, done := unixrpc.Server(h), make(chan struct{})
	go func() { defer close(done); server.Serve(l) }()
	t.Cleanup(func() { server.Close(); <-done })
	return path
}

func config(socket string) string {
	return fmt.Sprintf(`{"cniVersion":"1.1.0","name":"pil","type":"pilaster-cni","agentSocket":%q}`, socket)
}

// call starts both of them with an environment and a standard input, which must answer the same: what they print, and
// the exit code.
func call(t *testing.T, env []string, stdin string) (stdout, stderr string, exit int) {
	t.Helper()
	binaries, err := both()
	if err != nil {
		t.Fatal(err)
	}
	for i, binary := range binaries {
		var out, said strings.Builder
		cmd := exec.Command(binary, "an argument")
		cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, strings.NewReader(stdin), &out, &said
		var failed *exec.ExitError
		if err := cmd.Run(); err != nil && (!errors.As(err, &failed) || !failed.Exited()) {
			t.Fatalf("%s: %v\n%s", binary, err, said.String())
		}
		code := cmd.ProcessState.ExitCode()
		if i > 0 && (out.String() != stdout || said.String() != stderr || code != exit) {
			t.Fatalf(
				"%s ended with %d, said %q and %q\nand with Go's runtime %d, %q, %q",
				binaries[0],
				exit,
				stdout,
				stderr,
				code,
				out.String(),
				said.String(),
			)
		}
		stdout, stderr, exit = out.String(), said.String(), code
	}
	return stdout, stderr, exit
}

// run is one call with that configuration: what was printed, or the error of CNI that was.
func run(t *testing.T, verb, config string) (string, *types.Error) {
	t.Helper()
	stdout, stderr, exit := call(
		t,
		[]string{"HOME=/root", "CNI_COMMAND=" + verb, "CNI_CONTAINERID=c1", "CNI_ARGS=a=b\nHost: x"},
		config,
	)
	if stderr != "" {
		t.Errorf("%s: standard error has %q", verb, stderr)
	}
	if exit == 0 {
		return stdout, nil
	}
	refused := &types.Error{}
	if err := json.Unmarshal([]byte(stdout), refused); err != nil || refused.Code == 0 || refused.Msg == "" {
		t.Fatalf("%s: exit code %d with %q: %v", verb, exit, stdout, err)
	}
	return "", refused
}

var verbs = []string{"ADD", "DEL", "CHECK", "GC", "STATUS"}

func TestPassesOn(t *testing.T) {
	long := strings.Repeat("x", 300_000) // is more than one read of a socket or pipe
	var got string
	exit := "0"
	socket := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.URL.Path != "/cni" || r.Method != "POST" {
			t.Errorf("%s %s: %v", r.Method, r.URL, err)
		}
		got = string(body)
		w.Header().Set("Pilaster-Exit", exit)
		fmt.Fprintf(w, `{"code":102,"msg":"%s"}`, long)
	}))
	given := config(socket) + strings.Repeat(" ", 200_000)
	out, refused := run(t, "ADD", given)
	if want := "CNI_COMMAND=ADD\x00CNI_CONTAINERID=c1\x00CNI_ARGS=a=b\nHost: x\x00\x00" + given; refused != nil ||
		got != want {
		t.Errorf("%v; passed on was %.200q", refused, got)
	}
	if want := `{"code":102,"msg":"` + long + `"}`; out != want {
		t.Errorf("%d bytes were printed of %d", len(out), len(want))
	}
	exit = "1"
	if _, refused := run(t, "ADD", given); refused == nil || refused.Code != 102 {
		t.Errorf("refused with %v", refused)
	}
}

func TestKnownWithoutAnAgent(t *testing.T) {
	out, _, exit := call(t, []string{"CNI_COMMAND=VERSION"}, "")
	info, err := (&version.PluginDecoder{}).Decode([]byte(out))
	if want := cniserver.Versions(); exit != 0 || err != nil ||
		fmt.Sprint(info.SupportedVersions()) != fmt.Sprint(want.SupportedVersions()) {
		t.Errorf("VERSION says %q, %v; the agent speaks %v", out, err, want.SupportedVersions())
	}
	if out, help, exit := call(t, []string{"CNI_PATH=/x"}, ""); out != "" || exit != 0 ||
		!strings.Contains(help, "https://www.cni.dev") {
		t.Errorf("without a verb: %q, %q, %d", out, help, exit)
	}
}

func TestSocketsThatCannotBe(t *testing.T) {
	for config, want := range map[string]string{
		config("agent.sock"): `"agent.sock" is not an absolute path`,
		config("/" + strings.Repeat("x", 107)): "has more than the 107 bytes " +
			"that the path of a socket has at most",
		strings.Replace(config("/run/x"), "agentSocket", "agentsocket",
			1): `the key "agentsocket", which is written agentSocket`,
		strings.Replace(config("/run/x"), "agentSocket", "\\u0041GENTSOCKET", 1): `the key "AGENTSOCKET"`,
		strings.Replace(config("/run/x"), "agentSocket", "agent\u017foc\u212aET",
			1): "the key \"agent\u017foc\u212aET\"",
		`{"AgentSocket":null,` + config("/run/x")[1:]: `the key "AgentSocket"`,
	} {
		for _, verb := range verbs {
			if _, refused := run(t, verb, config); refused == nil || refused.Code != types.ErrInvalidNetworkConfig ||
				!strings.Contains(refused.Msg, want) {
				t.Errorf("%s with %s: %v, want %q", verb, config, refused, want)
			}
		}
	}
	if _, refused := new(Call).findSocket([]byte(`{"args":{"agentsocket":"/x"},"type":"agentsocket"}`)); refused != "" {
		t.Errorf("elsewhere: %s", refused)
	}
}

func TestAgentAway(t *testing.T) {
	socket := filepath.Join(t.TempDir(), `no"body`)
	stale := filepath.Join(t.TempDir(), "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close() // as after a crash
	for _, socket := range []string{socket, stale, "/" + strings.Repeat("x", 106)} {
		for _, verb := range verbs {
			want := types.ErrTryAgainLater
			if verb == "STATUS" {
				want = 50
			}
			if _, refused := run(t, verb, config(socket)); refused == nil || refused.Code != want ||
				!strings.Contains(refused.Msg, "the agent on "+socket+" does not answer: connect: ") {
				t.Errorf("%s: %v, want code %d", verb, refused, want)
			}
		}
	}
}

func TestEarlierAgent(t *testing.T) {
	socket := serve(t, http.NotFoundHandler())
	for _, verb := range verbs {
		if _, refused := run(t, verb, config(socket)); refused == nil ||
			!strings.Contains(refused.Msg, "older than this plugin; nothing was changed; upgrade the agent") {
			t.Errorf("%s: %v", verb, refused)
		}
	}
}

// Whoever answers on the socket, the plugin says what is wrong.
func TestStrangeAnswers(t *testing.T) {
	for name, answer := range map[string]string{
		"no HTTP":       "hello\r\n\r\n",
		"nothing":       "",
		"cut off":       "HTTP/1.0 200 OK\r\nPilaster-Exit: 0\r\nContent-Length: 100\r\n\r\nxx",
		"half a header": "HTTP/1.0 200 OK\r\nPilaster-Exit: 0\r\n",
		"status a word": "HTTP/1.0 fine\r\n\r\n",
		"another web":   "HTTP/1.0 200 OK\r\n\r\nhello",
		"no code":       "HTTP/1.0 200 OK\r\nPilaster-Exit: -1\r\n\r\n{}",
		"broken":        "HTTP/1.0 500 Internal Server Error\r\nPilaster-Exit: 0\r\n\r\n{}",
	} {
		path := filepath.Join(t.TempDir(), "s")
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Read(make([]byte, 1<<16))
				c.Write([]byte(answer))
				c.Close()
			}
		}()
		out, refused := run(t, "ADD", config(path))
		l.Close()
		<-done
		if refused == nil || refused.Code == 0 {
			t.Errorf("%s: printed %q", name, out)
		}
	}
}

func TestEscapesInTheSocket(t *testing.T) {
	for text, want := range map[string]string{
		`\u00e4\u00C4`: "äÄ", `\ud83d\ude00`: "😀", `\ud83d`: "\ufffd", `\ud83dx`: "\ufffdx", `\ud83d\u0041`: "\ufffdA",
		`\b\f\n\r\t\/\\\"`: "\b\f\n\r\t/\\\"",
	} {
		var judge string
		if err := json.Unmarshal([]byte(`"`+text+`"`), &judge); err != nil || judge != want {
			t.Fatalf("%s is %q, %v", text, judge, err)
		}
		if got, _ := new(Call).agentSocket([]byte(`{"agentSocket":"` + text + `"}`)); got != want {
			t.Errorf("%s read as %q, want %q", text, got, want)
		}
	}
}

func TestReadAndWriteAll(t *testing.T) {
	var pipe [2]int
	if err := syscall.Pipe(pipe[:]); err != nil {
		t.Fatal(err)
	}
	c := &Call{Kernel: syscall.Syscall6}
	want := strings.Repeat("0123456789", 100_000)
	go func() { defer syscall.Close(pipe[1]); c.Write(pipe[1], want) }()
	room := make([]byte, len(want)+1)
	n, failed := c.read(pipe[0], room, nil)
	if failed != 0 || string(room[:n]) != want {
		t.Errorf("%d bytes of %d came, %v", n, len(want), failed)
	}
	syscall.Close(pipe[0])
	if out, _, exit := read(c, pipe[0]); exit != 1 || !strings.Contains(out, `"code":5,`) {
		t.Errorf("a closed file was read: %q", out)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	if c.Write(int(full.Fd()), "x") {
		t.Error("a full disk took what was written")
	}
}

func read(c *Call, stdin int) (string, string, int) {
	c.Variable("CNI_COMMAND=ADD")
	return c.Run(stdin)
}

// What is longer than there is room for is refused, and says so.
func TestTooLong(t *testing.T) {
	if _, refused := run(t, "ADD", strings.Repeat(" ", maxCall)); refused == nil ||
		!strings.Contains(refused.Msg, "longer than 32 MiB") {
		t.Errorf("a configuration of 32 MiB: %v", refused)
	}
	length := maxAnswer - 1000
	socket := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Pilaster-Exit", "0")
		w.Write(make([]byte, length))
	}))
	if out, refused := run(t, "ADD", config(socket)); refused != nil || len(out) != length {
		t.Errorf("of %d bytes %d came: %v", length, len(out), refused)
	}
	length = maxAnswer
	if _, refused := run(t, "ADD", config(socket)); refused == nil ||
		!strings.Contains(refused.Msg, "longer than 1 MiB") {
		t.Errorf("an answer of 1 MiB: %v", refused)
	}
}
