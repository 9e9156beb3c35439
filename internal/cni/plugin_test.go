package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/local"
)

// fakeAgent refuses everything with one error, or answers.
type fakeAgent struct {
	pilasterv1connect.UnimplementedAgentServiceHandler
	err     error
	garbage *pilasterv1.CollectGarbageRequest
}

func (a *fakeAgent) AddEndpoint(_ context.Context, req *connect.Request[pilasterv1.AddEndpointRequest]) (*connect.Response[pilasterv1.AddEndpointResponse], error) {
	if a.err != nil {
		return nil, a.err
	}
	return connect.NewResponse(&pilasterv1.AddEndpointResponse{Endpoint: &pilasterv1.Endpoint{
		Interface: req.Msg.Interface, HostDevice: "pil1", ContainerMac: "02:70:69:6c:00:02", Mtu: 1400,
		Attachments: []*pilasterv1.Attachment{{Plaintext: "fd70::1", Address: "fc00::1", Gateway: "fe80::1", Routes: []string{"fc00::/8"}}},
		// Larger than one read of the socket.
		Labels: map[string]string{"filling": strings.Repeat("x", 300_000)},
	}}), nil
}

func (a *fakeAgent) DeleteEndpoint(context.Context, *connect.Request[pilasterv1.DeleteEndpointRequest]) (*connect.Response[pilasterv1.DeleteEndpointResponse], error) {
	return connect.NewResponse(&pilasterv1.DeleteEndpointResponse{}), a.err
}

func (a *fakeAgent) CheckEndpoint(context.Context, *connect.Request[pilasterv1.CheckEndpointRequest]) (*connect.Response[pilasterv1.CheckEndpointResponse], error) {
	return connect.NewResponse(&pilasterv1.CheckEndpointResponse{}), a.err
}

func (a *fakeAgent) CollectGarbage(_ context.Context, req *connect.Request[pilasterv1.CollectGarbageRequest]) (*connect.Response[pilasterv1.CollectGarbageResponse], error) {
	a.garbage = req.Msg
	return connect.NewResponse(&pilasterv1.CollectGarbageResponse{}), a.err
}

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

func serveAgent(t *testing.T, a *fakeAgent) string {
	mux := http.NewServeMux()
	mux.Handle(pilasterv1connect.NewAgentServiceHandler(a))
	return serve(t, mux)
}

func cmdArgs(socket string, more ...string) *skel.CmdArgs {
	stdin := conf(append([]string{fileTenant, fmt.Sprintf(`"agentSocket":%q`, socket)}, more...)...)
	return &skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Netns: "/run/netns/c1", StdinData: []byte(stdin)}
}

const prevResult = `"prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/run/netns/c1"}],"ips":[{"address":"fc00::1/128","interface":0}]}`

func cniCode(t *testing.T, err error) uint {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) {
		t.Fatalf("%v is no CNI error", err)
	}
	return e.Code
}

func TestCodes(t *testing.T) {
	verbs := Funcs(&bytes.Buffer{})
	for code, want := range map[connect.Code]struct{ add, check uint }{
		connect.CodeUnavailable:        {types.ErrTryAgainLater, types.ErrTryAgainLater},
		connect.CodeDeadlineExceeded:   {types.ErrTryAgainLater, types.ErrTryAgainLater},
		connect.CodeNotFound:           {101, types.ErrUnknownContainer},
		connect.CodeResourceExhausted:  {102, 102},
		connect.CodeInvalidArgument:    {types.ErrInvalidNetworkConfig, types.ErrInvalidNetworkConfig},
		connect.CodeFailedPrecondition: {types.ErrInternal, types.ErrInternal},
		connect.CodeAlreadyExists:      {types.ErrInternal, types.ErrInternal},
		connect.CodeInternal:           {types.ErrInternal, types.ErrInternal},
	} {
		socket := serveAgent(t, &fakeAgent{err: connect.NewError(code, errors.New("because of this"))})
		err := verbs.Add(cmdArgs(socket))
		if got := cniCode(t, err); got != want.add || !strings.Contains(err.Error(), "because of this") {
			t.Errorf("ADD, %v: code %d, want %d: %v", code, got, want.add, err)
		}
		if got := cniCode(t, verbs.Check(cmdArgs(socket, prevResult))); got != want.check {
			t.Errorf("CHECK, %v: code %d, want %d", code, got, want.check)
		}
	}
}

// An agent of an earlier build lacks methods; one of a later build says more.
func TestAgentsOfOtherBuilds(t *testing.T) {
	verbs := Funcs(&bytes.Buffer{})
	earlier := serve(t, http.NotFoundHandler())
	for name, call := range map[string]func(*skel.CmdArgs) error{"ADD": verbs.Add, "DEL": verbs.Del, "CHECK": verbs.Check, "GC": verbs.GC, "STATUS": verbs.Status} {
		if err := call(cmdArgs(earlier, prevResult)); err == nil || !strings.Contains(err.Error(), "older than this plugin; nothing was changed; upgrade the agent") {
			t.Errorf("%s: %v", name, err)
		}
	}
	later := &pilasterv1.StatusResponse{Ready: true}
	later.ProtoReflect().SetUnknown([]byte{0xc2, 0x3e, 5, 'l', 'a', 't', 'e', 'r'})
	body, err := proto.Marshal(later)
	if err != nil {
		t.Fatal(err)
	}
	socket := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(body) }))
	if err := verbs.Status(cmdArgs(socket)); err != nil {
		t.Errorf("STATUS of a later agent: %v", err)
	}
}

func TestAgentDown(t *testing.T) {
	verbs := Funcs(&bytes.Buffer{})
	socket := filepath.Join(t.TempDir(), "nobody.sock")
	for name, call := range map[string]func(*skel.CmdArgs) error{"ADD": verbs.Add, "DEL": verbs.Del, "CHECK": verbs.Check, "GC": verbs.GC} {
		if got := cniCode(t, call(cmdArgs(socket, prevResult))); got != types.ErrTryAgainLater {
			t.Errorf("%s: code %d, want 11", name, got)
		}
	}
	if got := cniCode(t, verbs.Status(cmdArgs(socket))); got != 50 {
		t.Errorf("STATUS: code %d, want 50", got)
	}
}

func TestBadConfigurationIsCode7(t *testing.T) {
	verbs := Funcs(&bytes.Buffer{})
	for name, call := range map[string]func(*skel.CmdArgs) error{"ADD": verbs.Add, "DEL": verbs.Del, "CHECK": verbs.Check, "GC": verbs.GC, "STATUS": verbs.Status} {
		if got := cniCode(t, call(cmdArgs("relative.sock"))); got != types.ErrInvalidNetworkConfig {
			t.Errorf("%s: code %d, want 7", name, got)
		}
	}
	args := &skel.CmdArgs{StdinData: []byte(conf())}
	if got := cniCode(t, verbs.Add(args)); got != types.ErrInvalidNetworkConfig {
		t.Errorf("ADD without a tenant: code %d, want 7", got)
	}
}

func TestResultInTheAskedVersion(t *testing.T) {
	socket := serveAgent(t, &fakeAgent{})
	for version, mtu := range map[string]any{"1.1.0": 1400.0, "1.0.0": 1400.0} {
		var out bytes.Buffer
		args := cmdArgs(socket)
		args.StdinData = bytes.Replace(args.StdinData, []byte("1.1.0"), []byte(version), 1)
		if err := Funcs(&out).Add(args); err != nil {
			t.Fatal(err)
		}
		var r map[string]any
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		inside := r["interfaces"].([]any)[1].(map[string]any)
		if r["cniVersion"] != version || inside["sandbox"] != "/run/netns/c1" || inside["mtu"] != mtu || strings.Contains(out.String(), "fd70") {
			t.Errorf("%s: %s", version, out.String())
		}
	}
}

func TestGarbageListInBothSpellings(t *testing.T) {
	a := &fakeAgent{}
	socket := serveAgent(t, a)
	for _, list := range []string{`"cni.dev/valid-attachments":[{"containerID":"x","ifname":"eth0"}]`, `"cni.dev/attachments":[{"containerID":"x","ifname":"eth0"}]`} {
		if err := Funcs(nil).GC(cmdArgs(socket, list)); err != nil {
			t.Fatal(err)
		}
		if g := a.garbage; g.CniNetwork != "pil" || len(g.Valid) != 1 || g.Valid[0].ContainerId != "x" || g.Valid[0].Interface != "eth0" {
			t.Errorf("%s became %v", list, g)
		}
	}
	if err := Funcs(nil).GC(cmdArgs(socket, `"cni.dev/valid-attachments":[],"cni.dev/attachments":[{"containerID":"x"}]`)); err != nil || len(a.garbage.Valid) != 0 {
		t.Errorf("an empty list became %v, %v", a.garbage, err)
	}
}

// Whoever answers on the socket, the plugin says what is wrong.
func TestStrangeAnswers(t *testing.T) {
	for name, answer := range map[string]string{
		"no HTTP":       "hello\r\n\r\n",
		"nothing":       "",
		"cut off":       "HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\nxx",
		"no header":     "HTTP/1.0 200 OK\r\n",
		"status a word": "HTTP/1.0 fine\r\n\r\n",
		"another web":   "HTTP/1.0 404 Not Found\r\n\r\nnot found",
		"not our proto": "HTTP/1.0 200 OK\r\n\r\n\xff\xff\xff",
		"empty message": "HTTP/1.0 200 OK\r\n\r\n",
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
		var out bytes.Buffer
		err = Funcs(&out).Add(cmdArgs(path))
		l.Close()
		<-done
		if err == nil || out.Len() > 0 {
			t.Errorf("%s: %v, printed %q", name, err, out.String())
		}
	}
}
