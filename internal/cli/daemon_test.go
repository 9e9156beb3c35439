package cli

import (
	"context"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/unixrpc"
)

// stuck is a daemon that accepts calls, but does not respond to Status and CreateTenant.
type stuck struct {
	pilasterv1connect.UnimplementedAgentServiceHandler
	pilasterv1connect.UnimplementedOperatorServiceHandler
	end <-chan struct{} // closed when Monitor must end
}

func (*stuck) Status(
	ctx context.Context,
	_ *connect.Request[pilasterv1.StatusRequest],
) (*connect.Response[pilasterv1.StatusResponse], error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (*stuck) CreateTenant(
	ctx context.Context,
	_ *connect.Request[pilasterv1.CreateTenantRequest],
) (*connect.Response[pilasterv1.CreateTenantResponse], error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (*stuck) RotateKey(
	context.Context,
	*connect.Request[pilasterv1.RotateKeyRequest],
) (*connect.Response[pilasterv1.RotateKeyResponse], error) {
	return connect.NewResponse(&pilasterv1.RotateKeyResponse{Id: 2}), nil
}

func (*stuck) GetTenant(
	context.Context,
	*connect.Request[pilasterv1.GetTenantRequest],
) (*connect.Response[pilasterv1.GetTenantResponse], error) {
	return nil, connect.NewError(connect.CodeInternal, errors.New("the store is lost"))
}

func (*stuck) ListNodes(
	context.Context,
	*connect.Request[pilasterv1.ListNodesRequest],
) (*connect.Response[pilasterv1.ListNodesResponse], error) {
	return nil, connect.NewError(connect.CodeInternal, errors.New("the nodes are lost"))
}

// DeleteTenant returns an error at once, like a daemon that sees the deadline pass before the client does.
func (*stuck) DeleteTenant(
	context.Context,
	*connect.Request[pilasterv1.DeleteTenantRequest],
) (*connect.Response[pilasterv1.DeleteTenantResponse], error) {
	return nil, context.DeadlineExceeded
}

func (s *stuck) Monitor(
	context.Context,
	*connect.Request[pilasterv1.MonitorRequest],
	*connect.ServerStream[pilasterv1.MonitorResponse],
) error {
	<-s.end
	return nil
}

func TestDaemonsThatDoNotAnswer(t *testing.T) {
	dir := t.TempDir()
	// A listener that never accepts a connection.
	unread, err := net.Listen("unix", filepath.Join(dir, "unread.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer unread.Close()
	path := filepath.Join(dir, "stuck.sock")
	l, err := unixrpc.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	mux, ready := http.NewServeMux(), make(chan struct{})
	mux.Handle(pilasterv1connect.NewAgentServiceHandler(&stuck{end: ready}))
	mux.Handle(pilasterv1connect.NewOperatorServiceHandler(&stuck{}))
	server := unixrpc.Server(mux)
	go server.Serve(l)
	defer server.Close()

	const says = " within 50ms; the daemon hangs, or is busy"
	refused(
		t,
		ExitUnreachable,
		unread.Addr().String()+says,
		"status",
		"--agent-socket",
		unread.Addr().String(),
		"--timeout",
		"50ms",
	)
	refused(
		t,
		ExitUnreachable,
		unread.Addr().String()+says,
		"node",
		"list",
		"--orchestrator-socket",
		unread.Addr().String(),
		"--timeout",
		"50ms",
	)
	refused(t, ExitUnreachable, path+says, "status", "--agent-socket", path, "--timeout", "50ms")
	refused(
		t,
		ExitUnreachable,
		"may still complete the request",
		"--timeout",
		"50ms",
		"tenant",
		"create",
		"blue",
		"--orchestrator-socket",
		path,
	)
	refused(
		t,
		ExitUnreachable,
		path+" within 10s; the daemon hangs",
		"tenant",
		"delete",
		"blue",
		"--orchestrator-socket",
		path,
	)
	refused(t, ExitUsage, "use a duration", "status", "--timeout", "0s")
	refused(t, ExitUsage, "use a duration", "status", "--timeout", "soon")
	refused(
		t,
		ExitFailed,
		"error: the store is lost\n  id 2 of tenant blue was created",
		"tenant",
		"rotate-key",
		"blue",
		"--orchestrator-socket",
		path,
	)

	// region delete first lists the nodes. If this fails, it deletes nothing.
	refused(t, ExitFailed, "the nodes are lost", "region", "delete", "east", "--orchestrator-socket", path)

	// --timeout does not apply to streams.
	ended := make(chan result)
	go func() { ended <- command(t, "monitor", "--agent-socket", path, "--timeout", "1ns") }()
	close(ready)
	if r := <-ended; r.code != ExitDone {
		t.Errorf("monitor: %+v, want exit %d", r, ExitDone)
	}
}
