package cniserver

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/containernetworking/cni/pkg/types"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

// fakeAgent returns err for each call or, without err, a fixed response.
type fakeAgent struct {
	pilasterv1connect.UnimplementedAgentServiceHandler
	err     error
	garbage *pilasterv1.CollectGarbageRequest
	status  *pilasterv1.StatusResponse
}

func (a *fakeAgent) Status(
	context.Context,
	*connect.Request[pilasterv1.StatusRequest],
) (*connect.Response[pilasterv1.StatusResponse], error) {
	return connect.NewResponse(a.status), a.err
}

func (a *fakeAgent) AddEndpoint(
	_ context.Context,
	req *connect.Request[pilasterv1.AddEndpointRequest],
) (*connect.Response[pilasterv1.AddEndpointResponse], error) {
	if a.err != nil {
		return nil, a.err
	}
	return connect.NewResponse(&pilasterv1.AddEndpointResponse{Endpoint: &pilasterv1.Endpoint{
		Interface: req.Msg.Interface, HostDevice: "pil1", ContainerMac: "02:70:69:6c:00:02", Mtu: 1400,
		Attachments: []*pilasterv1.Attachment{
			{Plaintext: "fd70::1", Address: "fc00::1", Gateway: "fe80::1", Routes: []string{"fc00::/8"}},
		},
	}}), nil
}

func (a *fakeAgent) DeleteEndpoint(
	context.Context,
	*connect.Request[pilasterv1.DeleteEndpointRequest],
) (*connect.Response[pilasterv1.DeleteEndpointResponse], error) {
	return connect.NewResponse(&pilasterv1.DeleteEndpointResponse{}), a.err
}

func (a *fakeAgent) CheckEndpoint(
	context.Context,
	*connect.Request[pilasterv1.CheckEndpointRequest],
) (*connect.Response[pilasterv1.CheckEndpointResponse], error) {
	return connect.NewResponse(&pilasterv1.CheckEndpointResponse{}), a.err
}

func (a *fakeAgent) CollectGarbage(
	_ context.Context,
	req *connect.Request[pilasterv1.CollectGarbageRequest],
) (*connect.Response[pilasterv1.CollectGarbageResponse], error) {
	a.garbage = req.Msg
	return connect.NewResponse(&pilasterv1.CollectGarbageResponse{}), a.err
}

// request returns a request of the plugin for container c1. Variables in but replace the defaults.
func request(verb, config string, but ...string) string {
	env := []string{
		"CNI_COMMAND=" + verb,
		"CNI_CONTAINERID=c1",
		"CNI_IFNAME=eth0",
		"CNI_NETNS=/run/netns/c1",
		"CNI_PATH=/opt/cni/bin",
	}
	for _, variable := range but {
		name, _, _ := strings.Cut(variable, "=")
		env = slices.DeleteFunc(env, func(old string) bool { return strings.HasPrefix(old, name+"=") })
		env = append(env, variable)
	}
	return strings.Join(env, "\x00") + "\x00\x00" + config
}

// serveCall sends a request to a handler. It returns the output, or the CNI error if the exit code is not 0.
func serveCall(t *testing.T, a Agent, body string) (string, error) {
	t.Helper()
	reported := -1
	h := Handler(a, slog.New(slog.DiscardHandler), func(_ string, code uint, _ time.Duration) { reported = int(code) })
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("POST", "/cni", strings.NewReader(body)))
	answer := w.Body.String()
	switch exit := w.Header().Get("Pilaster-Exit"); {
	case exit == "0" && reported == 0:
		return answer, nil
	case exit != "1":
		t.Fatalf("got exit code %q with %q, want 0 or 1", exit, answer)
	}
	refused := &types.Error{}
	if err := json.Unmarshal([]byte(answer), refused); err != nil || int(refused.Code) != reported ||
		refused.Code == 0 ||
		refused.Msg == "" {
		t.Fatalf("got %q, %v; want an error with code %d", answer, err, reported)
	}
	return "", refused
}

const prevResult = `"prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/run/netns/c1"}],` +
	`"ips":[{"address":"fc00::1/128","interface":0}]}`

func cniCode(t *testing.T, err error) uint {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) {
		t.Fatalf("got error %v, want a CNI error", err)
	}
	return e.Code
}

// STATUS fails on an Edge Switch: it is ready, but cannot have containers.
func TestStatusOfAnEdgeSwitch(t *testing.T) {
	for _, edge := range []bool{false, true} {
		a := &fakeAgent{status: &pilasterv1.StatusResponse{Ready: true, Node: &pilasterv1.Node{Edge: edge}}}
		_, err := serveCall(t, a, request("STATUS", conf()))
		if refused := err != nil && cniCode(t, err) == codeNotAvailable &&
			strings.Contains(err.Error(), "Edge Switch"); refused != edge ||
			(err != nil) != edge {
			t.Errorf("edge %v: got error %v", edge, err)
		}
	}
}

func TestCodes(t *testing.T) {
	for code, want := range map[connect.Code]struct{ add, check uint }{
		connect.CodeUnavailable:        {types.ErrTryAgainLater, types.ErrTryAgainLater},
		connect.CodeDeadlineExceeded:   {types.ErrTryAgainLater, types.ErrTryAgainLater},
		connect.CodeCanceled:           {types.ErrTryAgainLater, types.ErrTryAgainLater},
		connect.CodeNotFound:           {101, types.ErrUnknownContainer},
		connect.CodeResourceExhausted:  {102, 102},
		connect.CodeInvalidArgument:    {types.ErrInvalidNetworkConfig, types.ErrInvalidNetworkConfig},
		connect.CodeFailedPrecondition: {types.ErrInternal, types.ErrInternal},
		connect.CodeAlreadyExists:      {types.ErrInternal, types.ErrInternal},
		connect.CodeInternal:           {types.ErrInternal, types.ErrInternal},
	} {
		a := &fakeAgent{err: connect.NewError(code, errors.New("because of this"))}
		_, err := serveCall(t, a, request("ADD", conf(fileTenant)))
		if got := cniCode(t, err); got != want.add || err.Error() != "because of this" {
			t.Errorf("ADD, %v: got code %d, want %d: %v", code, got, want.add, err)
		}
		_, err = serveCall(t, a, request("CHECK", conf(prevResult)))
		if got := cniCode(t, err); got != want.check {
			t.Errorf("CHECK, %v: got code %d, want %d", code, got, want.check)
		}
		_, err = serveCall(t, a, request("DEL", conf()))
		if got := cniCode(t, err); got != want.add {
			t.Errorf("DEL, %v: got code %d, want %d", code, got, want.add)
		}
	}
}

// Invalid calls of a runtime are refused with the specification's codes, without a call to the agent.
func TestInvalidCalls(t *testing.T) {
	full := conf(fileTenant)
	for name, c := range map[string]struct {
		body, text string
		code       uint
	}{
		"empty request":       {"", "incomplete", types.ErrDecodingFailure},
		"no end of variables": {"CNI_COMMAND=ADD\x00", "incomplete", types.ErrDecodingFailure},
		"unknown verb": {request("MOVE", full), `unknown CNI_COMMAND: "MOVE"`,
			types.ErrInvalidEnvironmentVariables},
		"no container": {request("ADD", full, "CNI_CONTAINERID="), "[CNI_CONTAINERID] missing",
			types.ErrInvalidEnvironmentVariables},
		"two missing": {request("CHECK", full, "CNI_NETNS=", "CNI_IFNAME="), "[CNI_NETNS,CNI_IFNAME] missing",
			types.ErrInvalidEnvironmentVariables},
		"a path as a container": {request("DEL", full, "CNI_CONTAINERID=../x"), "containerID",
			types.ErrInvalidEnvironmentVariables},
		"a path as a device": {request("DEL", full, "CNI_IFNAME=a/b"), "interface name",
			types.ErrInvalidEnvironmentVariables},
		"no JSON": {request("DEL", "{"), "network configuration", types.ErrDecodingFailure},
		"no name": {request("DEL", `{"cniVersion":"1.0.0"}`), "network name", types.ErrInvalidNetworkConfig},
		"a name with a slash": {request("DEL", `{"cniVersion":"1.0.0","name":"a/b"}`), "network name",
			types.ErrInvalidNetworkConfig},
		"a later version": {request("ADD", strings.Replace(full, "1.1.0", "1.2.0", 1)), "incompatible",
			types.ErrIncompatibleCNIVersion},
		"no version": {request("ADD", `{"name":"a"}`), "incompatible", types.ErrIncompatibleCNIVersion},
		"GC in CNI 1.0.0": {request("GC", strings.Replace(full, "1.1.0", "1.0.0", 1)), "GC needs",
			types.ErrIncompatibleCNIVersion},
		"STATUS in CNI 1.0.0": {request("STATUS", strings.Replace(full, "1.1.0", "1.0.0", 1)), "STATUS needs",
			types.ErrIncompatibleCNIVersion},
		"a tenant as a number": {request("DEL", conf(`"tenant":5`)), "configuration", types.ErrInvalidNetworkConfig},
		"ADD without a tenant": {request("ADD", conf()), "configuration", types.ErrInvalidNetworkConfig},
	} {
		_, err := serveCall(t, nil, c.body) // a call to the agent would panic
		if got := cniCode(t, err); got != c.code || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: got code %d, %v; want %d and %q", name, got, err, c.code, c.text)
		}
	}
	// A DEL needs no network namespace, which may not exist any more.
	if _, err := serveCall(t, &fakeAgent{}, request("DEL", conf(), "CNI_NETNS=")); err != nil {
		t.Error(err)
	}
}

func TestResultVersions(t *testing.T) {
	for version, mtu := range map[string]any{"1.1.0": 1400.0, "1.0.0": 1400.0} {
		out, err := serveCall(t, &fakeAgent{}, request("ADD", strings.Replace(conf(fileTenant), "1.1.0", version, 1)))
		if err != nil {
			t.Fatal(err)
		}
		var r map[string]any
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatal(err)
		}
		inside := r["interfaces"].([]any)[1].(map[string]any)
		if r["cniVersion"] != version || inside["sandbox"] != "/run/netns/c1" || inside["mtu"] != mtu ||
			strings.Contains(out, "fd70") {
			t.Errorf("version %s: got result %s", version, out)
		}
	}
}

func TestValidAttachmentKeys(t *testing.T) {
	a := &fakeAgent{}
	for _, list := range []string{`"cni.dev/valid-attachments":[{"containerID":"x","ifname":"eth0"}]`,
		`"cni.dev/attachments":[{"containerID":"x","ifname":"eth0"}]`} {
		if _, err := serveCall(t, a, request("GC", conf(list))); err != nil {
			t.Fatal(err)
		}
		if g := a.garbage; g.CniNetwork != "pil" || len(g.Valid) != 1 || g.Valid[0].ContainerId != "x" ||
			g.Valid[0].Interface != "eth0" {
			t.Errorf("%s: the agent received %v", list, g)
		}
	}
	if _, err := serveCall(t, a, request("GC",
		conf(`"cni.dev/valid-attachments":[],"cni.dev/attachments":[{"containerID":"x"}]`))); err != nil ||
		len(a.garbage.Valid) != 0 {
		t.Errorf("empty list: the agent received %v, %v", a.garbage, err)
	}
}
