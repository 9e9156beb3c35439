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

// serve serves h on a socket and returns its path.
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

// call runs both binaries, which must print the same and exit with the same code.
func call(t *testing.T, env []string, stdin string) (stdout, stderr string, exit int) {
	t.Helper()
	binaries, err := both()
	if err != nil {
		t.Fatal(err)
	}
	for i, binary := range binaries {
		var out, errs strings.Builder
		cmd := exec.Command(binary, "an argument")
		cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, strings.NewReader(stdin), &out, &errs
		var failed *exec.ExitError
		if err := cmd.Run(); err != nil && (!errors.As(err, &failed) || !failed.Exited()) {
			t.Fatalf("%s: %v\n%s", binary, err, errs.String())
		}
		code := cmd.ProcessState.ExitCode()
		if i > 0 && (out.String() != stdout || errs.String() != stderr || code != exit) {
			t.Fatalf(
				"%s exited with %d and printed %q and %q\nwith Go's runtime %d, %q and %q",
				binaries[0],
				exit,
				stdout,
				stderr,
				code,
				out.String(),
				errs.String(),
			)
		}
		stdout, stderr, exit = out.String(), errs.String(), code
	}
	return stdout, stderr, exit
}

// run makes a call with a configuration and returns the printed result or CNI error.
func run(t *testing.T, verb, config string) (string, *types.Error) {
	t.Helper()
	stdout, stderr, exit := call(
		t,
		[]string{"HOME=/root", "CNI_COMMAND=" + verb, "CNI_CONTAINERID=c1", "CNI_ARGS=a=b\nHost: x"},
		config,
	)
	if stderr != "" {
		t.Errorf("%s: got %q on standard error, want none", verb, stderr)
	}
	if exit == 0 {
		return stdout, nil
	}
	refused := &types.Error{}
	if err := json.Unmarshal([]byte(stdout), refused); err != nil || refused.Code == 0 || refused.Msg == "" {
		t.Fatalf("%s: exit code %d with %q, %v; want a CNI error", verb, exit, stdout, err)
	}
	return "", refused
}

var verbs = []string{"ADD", "DEL", "CHECK", "GC", "STATUS"}

func TestForwardsCalls(t *testing.T) {
	long := strings.Repeat("x", 300_000) // longer than one read of a socket or pipe
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
	conf := config(socket) + strings.Repeat(" ", 200_000)
	out, refused := run(t, "ADD", conf)
	if want := "CNI_COMMAND=ADD\x00CNI_CONTAINERID=c1\x00CNI_ARGS=a=b\nHost: x\x00\x00" + conf; refused != nil ||
		got != want {
		t.Errorf("got error %v, the agent received %.200q", refused, got)
	}
	if want := `{"code":102,"msg":"` + long + `"}`; out != want {
		t.Errorf("printed %d bytes, want %d", len(out), len(want))
	}
	exit = "1"
	if _, refused := run(t, "ADD", conf); refused == nil || refused.Code != 102 {
		t.Errorf("got error %v, want code 102", refused)
	}
}

func TestCallsWithoutAgent(t *testing.T) {
	out, _, exit := call(t, []string{"CNI_COMMAND=VERSION"}, "")
	info, err := (&version.PluginDecoder{}).Decode([]byte(out))
	if want := cniserver.Versions(); exit != 0 || err != nil ||
		fmt.Sprint(info.SupportedVersions()) != fmt.Sprint(want.SupportedVersions()) {
		t.Errorf("VERSION: got %q, %v; want versions %v, as of the agent", out, err, want.SupportedVersions())
	}
	if out, help, exit := call(t, []string{"CNI_PATH=/x"}, ""); out != "" || exit != 0 ||
		!strings.Contains(help, "https://www.cni.dev") {
		t.Errorf("without a verb: printed %q and %q, exit code %d; want help on standard error", out, help, exit)
	}
}

func TestInvalidSockets(t *testing.T) {
	for config, want := range map[string]string{
		config("agent.sock"): `"agent.sock" is not an absolute path`,
		config("/" + strings.Repeat("x", 107)): "is longer than the 107 bytes " +
			"that the path of a socket may have",
		strings.Replace(config("/run/x"), "agentSocket", "agentsocket",
			1): `the key "agentsocket" must be written agentSocket`,
		strings.Replace(config("/run/x"), "agentSocket", "\\u0041GENTSOCKET", 1): `the key "AGENTSOCKET"`,
		strings.Replace(config("/run/x"), "agentSocket", "agent\u017foc\u212aET",
			1): "the key \"agent\u017foc\u212aET\"",
		`{"AgentSocket":null,` + config("/run/x")[1:]: `the key "AgentSocket"`,
	} {
		for _, verb := range verbs {
			if _, refused := run(t, verb, config); refused == nil || refused.Code != types.ErrInvalidNetworkConfig ||
				!strings.Contains(refused.Msg, want) {
				t.Errorf("%s with %s: got error %v, want %q", verb, config, refused, want)
			}
		}
	}
	if _, refused := new(Call).findSocket([]byte(`{"args":{"agentsocket":"/x"},"type":"agentsocket"}`)); refused != "" {
		t.Errorf("the key in another object: got error %s", refused)
	}
}

func TestUnreachableAgent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), `missing"`)
	stale := filepath.Join(t.TempDir(), "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close() // as after a crash: the file remains
	for _, socket := range []string{socket, stale, "/" + strings.Repeat("x", 106)} {
		for _, verb := range verbs {
			want := types.ErrTryAgainLater
			if verb == "STATUS" {
				want = 50
			}
			if _, refused := run(t, verb, config(socket)); refused == nil || refused.Code != want ||
				!strings.Contains(refused.Msg, "the agent on "+socket+" does not answer: connect: ") {
				t.Errorf("%s: got error %v, want code %d", verb, refused, want)
			}
		}
	}
}

func TestEarlierAgent(t *testing.T) {
	socket := serve(t, http.NotFoundHandler())
	for _, verb := range verbs {
		if _, refused := run(t, verb, config(socket)); refused == nil ||
			!strings.Contains(refused.Msg, "older than this plugin; nothing was changed; upgrade the agent") {
			t.Errorf("%s: got error %v, want advice to upgrade the agent", verb, refused)
		}
	}
}

// The plugin reports an error for each response that is not from an agent.
func TestInvalidResponses(t *testing.T) {
	for name, answer := range map[string]string{
		"no HTTP":       "hello\r\n\r\n",
		"no response":   "",
		"cut off":       "HTTP/1.0 200 OK\r\nPilaster-Exit: 0\r\nContent-Length: 100\r\n\r\nxx",
		"half a header": "HTTP/1.0 200 OK\r\nPilaster-Exit: 0\r\n",
		"no number":     "HTTP/1.0 fine\r\n\r\n",
		"no exit code":  "HTTP/1.0 200 OK\r\n\r\nhello",
		"exit code -1":  "HTTP/1.0 200 OK\r\nPilaster-Exit: -1\r\n\r\n{}",
		"status 500":    "HTTP/1.0 500 Internal Server Error\r\nPilaster-Exit: 0\r\n\r\n{}",
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
			t.Errorf("%s: printed %q, want a CNI error", name, out)
		}
	}
}

func TestEscapesInTheSocket(t *testing.T) {
	for text, want := range map[string]string{
		`\u00e4\u00C4`: "äÄ", `\ud83d\ude00`: "😀", `\ud83d`: "\ufffd", `\ud83dx`: "\ufffdx", `\ud83d\u0041`: "\ufffdA",
		`\b\f\n\r\t\/\\\"`: "\b\f\n\r\t/\\\"",
	} {
		var decoded string
		if err := json.Unmarshal([]byte(`"`+text+`"`), &decoded); err != nil || decoded != want {
			t.Fatalf("encoding/json decodes %s as %q, %v; want %q", text, decoded, err, want)
		}
		if got, _ := new(Call).agentSocket([]byte(`{"agentSocket":"` + text + `"}`)); got != want {
			t.Errorf("%s: got %q, want %q", text, got, want)
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
		t.Errorf("read %d bytes of %d, %v", n, len(want), failed)
	}
	syscall.Close(pipe[0])
	if out, _, exit := read(c, pipe[0]); exit != 1 || !strings.Contains(out, `"code":5,`) {
		t.Errorf("with standard input closed: printed %q, want an error with code 5", out)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	if c.Write(int(full.Fd()), "x") {
		t.Error("Write to /dev/full succeeded, want an error")
	}
}

func read(c *Call, stdin int) (string, string, int) {
	c.Variable("CNI_COMMAND=ADD")
	return c.Run(stdin)
}

// The plugin refuses configurations and responses above its limits.
func TestTooLong(t *testing.T) {
	if _, refused := run(t, "ADD", strings.Repeat(" ", maxCall)); refused == nil ||
		!strings.Contains(refused.Msg, "longer than 32 MiB") {
		t.Errorf("configuration of 32 MiB: got error %v", refused)
	}
	length := maxAnswer - 1000
	socket := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Pilaster-Exit", "0")
		w.Write(make([]byte, length))
	}))
	if out, refused := run(t, "ADD", config(socket)); refused != nil || len(out) != length {
		t.Errorf("printed %d bytes, want %d; error %v", len(out), length, refused)
	}
	length = maxAnswer
	if _, refused := run(t, "ADD", config(socket)); refused == nil ||
		!strings.Contains(refused.Msg, "longer than 1 MiB") {
		t.Errorf("response of 1 MiB: got error %v", refused)
	}
}
