package orchestrator

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
)

// After one orchestrator has rotated the join token, both refuse the old one at once.
func TestRotateToken(t *testing.T) {
	t.Parallel()
	etcd := storetest.Debian(t)
	here, there := testConfig(t), testConfig(t)
	here.Etcd, there.Etcd = etcd, etcd
	a, b := start(t, here), start(t, there)
	before, old := a.Token(), b.token.Current()
	if before != b.Token() {
		t.Fatal("the orchestrators of one cluster have different tokens")
	}
	member := registered(t, a, testNode(1))
	try := func(s *Server, n int, token string) error {
		node := testNode(n)
		c, err := join.Dial(
			t.Context(),
			join.Config{
				URL:      s.url(),
				Token:    token,
				StateDir: t.TempDir(),
				NodeName: node.Name,
				NodeUUID: node.UUID,
				Log:      s.config.Log,
			},
		)
		if err == nil {
			c.Close()
		}
		return err
	}
	resp, err := operator(here.RunDir).RotateToken(t.Context(), connect.NewRequest(&pilasterv1.RotateTokenRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	after := resp.Msg.Token
	if after == before || strings.Split(after, ".")[2] != strings.Split(before, ".")[2] {
		t.Fatalf("token %s became %s, want another secret for the same authority", before, after)
	}
	if text, err := os.ReadFile(filepath.Join(here.DataDir, "join-token")); err != nil || string(text) != after+"\n" {
		t.Errorf("got %q, %v in the token file; want %s", text, err, after)
	}
	for s, updated := range map[*Server]bool{a: true, b: false} {
		if !updated { // as before the store's watch has delivered the new token
			s.token.Known.Store(&old)
		}
		err := try(s, 2, before)
		wantCode(t, err, connect.CodeUnauthenticated)
		if err != nil && !strings.Contains(err.Error(), "token show") {
			t.Errorf("got error %v, want one with advice", err)
		}
	}
	got, err := operator(there.RunDir).GetToken(t.Context(), connect.NewRequest(&pilasterv1.GetTokenRequest{}))
	if err != nil || got.Msg.Token != after {
		t.Errorf("the other orchestrator shows token %v, %v; want %s", got, err, after)
	}
	if err := try(a, 2, after); err != nil {
		t.Errorf("join with the new token: %v", err)
	}
	// A node that has joined needs no token.
	if err := register(t, member); err != nil {
		t.Errorf("register a node that has joined before: %v", err)
	}
}

// An orchestrator writes a token that another one has rotated to its file. A restart keeps the new token.
func TestTokenFileIsUpdated(t *testing.T) {
	t.Parallel()
	etcd := storetest.Debian(t)
	here, there := testConfig(t), testConfig(t)
	here.Etcd, there.Etcd = etcd, etcd
	a, err := Start(t.Context(), here)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { a.Close() }()
	b := start(t, there)
	resp, err := operator(here.RunDir).RotateToken(t.Context(), connect.NewRequest(&pilasterv1.RotateTokenRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(there.DataDir, "join-token") // written after the old token is refused
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		text, err := os.ReadFile(file)
		if err == nil && string(text) == resp.Msg.Token+"\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("after 20 s, the other orchestrator's file has %q, %v; want %s", text, err, resp.Msg.Token)
		}
	}
	if b.Token() != resp.Msg.Token {
		t.Errorf("the other orchestrator has token %s, want %s", b.Token(), resp.Msg.Token)
	}
	a.Close()
	if a, err = Start(t.Context(), here); err != nil {
		t.Fatal(err)
	}
	if a.Token() != resp.Msg.Token {
		t.Errorf("after a restart, the token is %s, want %s", a.Token(), resp.Msg.Token)
	}
}
