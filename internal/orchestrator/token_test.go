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

// Two orchestrators of one cluster: what one rotates, the other refuses at once and writes to its file.
func TestTokenIsRotated(t *testing.T) {
	t.Parallel()
	etcd := storetest.Debian(t)
	here, there := testConfig(t), testConfig(t)
	here.Etcd, there.Etcd = etcd, etcd
	a, b := start(t, here), start(t, there)
	before, old := a.Token(), b.token.Current()
	if before != b.Token() {
		t.Fatal("two tokens of one cluster")
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
		t.Fatalf("%s became %s: another secret of the same authority was wanted", before, after)
	}
	if text, err := os.ReadFile(filepath.Join(here.DataDir, "join-token")); err != nil || string(text) != after+"\n" {
		t.Errorf("the file has %q, %v", text, err)
	}
	for s, told := range map[*Server]bool{a: true, b: false} {
		if !told { // it has not heard yet
			s.token.Known.Store(&old)
		}
		err := try(s, 2, before)
		wantCode(t, err, connect.CodeUnauthenticated)
		if err != nil && !strings.Contains(err.Error(), "token show") {
			t.Errorf("%v does not say what to do", err)
		}
	}
	if got, err := operator(there.RunDir).GetToken(t.Context(), connect.NewRequest(&pilasterv1.GetTokenRequest{})); err != nil ||
		got.Msg.Token != after {
		t.Errorf("the other one shows %v, %v", got, err)
	}
	if err := try(a, 2, after); err != nil {
		t.Errorf("the new token: %v", err)
	}
	// Who is a member needs no token.
	if _, err := member.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test"})); err != nil {
		t.Errorf("a member: %v", err)
	}
}

// The file follows what another orchestrator did, and a restart does not bring the old token back.
func TestTokenFileFollows(t *testing.T) {
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
	file := filepath.Join(there.DataDir, "join-token") // it is written after the old token is refused
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		text, err := os.ReadFile(file)
		if err == nil && string(text) == resp.Msg.Token+"\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the other orchestrator never heard of it: its file has %q, %v", text, err)
		}
	}
	if b.Token() != resp.Msg.Token {
		t.Error("the other orchestrator still takes the old token")
	}
	a.Close()
	if a, err = Start(t.Context(), here); err != nil {
		t.Fatal(err)
	}
	if a.Token() != resp.Msg.Token {
		t.Error("a restart has another token")
	}
}
