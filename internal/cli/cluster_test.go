package cli

import (
	"log/slog"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator"
)

// startOrchestrator starts an orchestrator, and sets the environment variable by which commands find the orchestrator's
// socket.
func startOrchestrator(t *testing.T, change ...func(*orchestrator.Config)) *orchestrator.Server {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", orchestrator.Socket(dir))
	c := orchestrator.Config{
		DataDir: filepath.Join(dir, "data"), RunDir: dir, Listen: "[::1]:0", Log: slog.New(slog.DiscardHandler),
	}
	for _, change := range change {
		change(&c)
	}
	s, err := orchestrator.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// joinNode joins a node to the cluster and registers it.
func joinNode(t *testing.T, s *orchestrator.Server, name string, as *pilasterv1.RegisterRequest) *join.Client {
	t.Helper()
	client, err := join.Dial(t.Context(), join.Config{
		URL: "https://" + s.Addr().
			String(),
		Token: s.Token(), StateDir: t.TempDir(), NodeName: name, NodeUUID: "00000000-0000-4000-8000-000000000001",
		Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	if _, err := client.Register(t.Context(), connect.NewRequest(as)); err != nil {
		t.Fatal(err)
	}
	return client
}
