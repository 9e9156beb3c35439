package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"pilaster.io/pilaster/internal/cni"
	"pilaster.io/pilaster/internal/local"
)

// serve answers on a socket with h and returns its path.
func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := local.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	server, done := local.Server(h), make(chan struct{})
	go func() { defer close(done); server.Serve(l) }()
	t.Cleanup(func() { server.Close(); <-done })
	return path
}

func config(socket string) string {
	return fmt.Sprintf(`{"cniVersion":"1.1.0","name":"pil","type":"pilaster-cni","agentSocket":%q}`, socket)
}

// run is one call with that configuration: what was printed, or the error of CNI that was.
func run(t *testing.T, verb, config string) (string, *types.Error) {
	t.Helper()
	env := []string{"HOME=/root", "CNI_COMMAND=" + verb, "CNI_CONTAINERID=c1", "CNI_ARGS=a=b\nHost: x"}
	stdout, stderr, exit := Run(env, func() ([]byte, error) { return []byte(config), nil })
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
	if want := "CNI_COMMAND=ADD\x00CNI_CONTAINERID=c1\x00CNI_ARGS=a=b\nHost: x\x00\x00" + given; refused != nil || got != want {
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
	none := func() ([]byte, error) { return nil, errors.New("nothing is to be read") }
	out, _, exit := Run([]string{"CNI_COMMAND=VERSION"}, none)
	info, err := (&version.PluginDecoder{}).Decode([]byte(out))
	if want := cni.Versions(); exit != 0 || err != nil || fmt.Sprint(info.SupportedVersions()) != fmt.Sprint(want.SupportedVersions()) {
		t.Errorf("VERSION says %q, %v; the agent speaks %v", out, err, want.SupportedVersions())
	}
	if out, help, exit := Run([]string{"CNI_PATH=/x"}, none); out != "" || exit != 0 || !strings.Contains(help, "https://www.cni.dev") {
		t.Errorf("without a verb: %q, %q, %d", out, help, exit)
	}
	if out, _, exit := Run([]string{"CNI_COMMAND=ADD"}, none); exit != 1 || !strings.Contains(out, `"code":5,`) {
		t.Errorf("without a configuration: %q, %d", out, exit)
	}
}

func TestSocketsThatCannotBe(t *testing.T) {
	for config, want := range map[string]string{
		config("agent.sock"):                                                     `"agent.sock" is not an absolute path`,
		config("/" + strings.Repeat("x", 107)):                                   "has 108 bytes, and the path of a socket has 107 at most",
		strings.Replace(config("/run/x"), "agentSocket", "agentsocket", 1):       `the key "agentsocket", which is written agentSocket`,
		strings.Replace(config("/run/x"), "agentSocket", "\\u0041GENTSOCKET", 1): `the key "AGENTSOCKET"`,
		`{"AgentSocket":null,` + config("/run/x")[1:]:                            `the key "AgentSocket"`,
	} {
		for _, verb := range verbs {
			if _, refused := run(t, verb, config); refused == nil || refused.Code != types.ErrInvalidNetworkConfig || !strings.Contains(refused.Msg, want) {
				t.Errorf("%s with %s: %v, want %q", verb, config, refused, want)
			}
		}
	}
	if _, refused := findSocket([]byte(`{"args":{"agentsocket":"/x"},"type":"agentsocket"}`)); refused != "" {
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
			if _, refused := run(t, verb, config(socket)); refused == nil || refused.Code != want || !strings.Contains(refused.Msg, "the agent on "+socket+" does not answer: connect: ") {
				t.Errorf("%s: %v, want code %d", verb, refused, want)
			}
		}
	}
}

func TestEarlierAgent(t *testing.T) {
	socket := serve(t, http.NotFoundHandler())
	for _, verb := range verbs {
		if _, refused := run(t, verb, config(socket)); refused == nil || !strings.Contains(refused.Msg, "older than this plugin; nothing was changed; upgrade the agent") {
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
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			c.Read(make([]byte, 1<<16))
			c.Write([]byte(answer))
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
		`\u00e4\u00C4`: "äÄ", `\ud83d\ude00`: "😀", `\ud83d`: "\ufffd", `\ud83dx`: "\ufffdx", `\ud83d\u0041`: "\ufffdA", `\b\f\n\r\t\/\\\"`: "\b\f\n\r\t/\\\"",
	} {
		var judge string
		if err := json.Unmarshal([]byte(`"`+text+`"`), &judge); err != nil || judge != want {
			t.Fatalf("%s is %q, %v", text, judge, err)
		}
		if got, _ := agentSocket([]byte(`{"agentSocket":"` + text + `"}`)); got != want {
			t.Errorf("%s read as %q, want %q", text, got, want)
		}
	}
}

func TestReadAndWriteAll(t *testing.T) {
	var pipe [2]int
	if err := syscall.Pipe(pipe[:]); err != nil {
		t.Fatal(err)
	}
	want := strings.Repeat("0123456789", 100_000)
	go func() { defer syscall.Close(pipe[1]); Write(pipe[1], []byte(want)) }()
	got, err := Read(pipe[0])
	if err != nil || string(got) != want {
		t.Errorf("%d bytes of %d came, %v", len(got), len(want), err)
	}
	syscall.Close(pipe[0])
	if _, err := Read(pipe[0]); err == nil {
		t.Error("a closed file was read")
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	if Write(int(full.Fd()), []byte("x")) == nil {
		t.Error("a full disk took what was written")
	}
}
