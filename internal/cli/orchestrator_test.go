package cli

import (
	"encoding/json"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator"
)

// result is the exit code and the output of a command.
type result struct {
	code           int
	stdout, stderr string
}

func command(t *testing.T, args ...string) result {
	t.Helper()
	code, stdout, stderr := run(t, "", args...)
	return result{code, stdout, stderr}
}

// prints runs a command and checks its whole output.
func prints(t *testing.T, want string, args ...string) {
	t.Helper()
	if r := command(t, args...); r.stdout != want {
		t.Errorf("%v: exit %d, stdout\n%s\nstderr %q; want stdout\n%s", args, r.code, r.stdout, r.stderr, want)
	}
}

// ask runs a command that must succeed, and decodes its JSON.
func ask[T any](t *testing.T, args ...string) (v T) {
	t.Helper()
	r := command(t, append(args, "-o", "json")...)
	if r.code != ExitDone {
		t.Fatalf("%v: exit %d, %s", args, r.code, r.stderr)
	}
	if err := json.Unmarshal([]byte(r.stdout), &v); err != nil {
		t.Fatalf("%v: %v in %s", args, err, r.stdout)
	}
	return v
}

func refused(t *testing.T, code int, says string, args ...string) {
	t.Helper()
	r := command(t, args...)
	if r.code != code || !strings.Contains(r.stderr, says) || !strings.Contains(r.stderr, "error: ") || r.stdout != "" {
		t.Errorf("%v: exit %d and %q, want exit %d and %q", args, r.code, r.stdout+r.stderr, code, says)
	}
}

func TestOperatorCommands(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", orchestrator.Socket(dir))
	refused(t, ExitUnreachable, orchestrator.Socket(dir), "tenant", "list")
	refused(t, ExitUnreachable, orchestrator.Socket(dir), "node", "get", "n1")

	s, err := orchestrator.Start(t.Context(), orchestrator.Config{
		DataDir: filepath.Join(dir, "data"), RunDir: dir, Listen: "[::1]:0", Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)

	blue := ask[tenantView](t, "tenant", "create", "blue")
	if blue.Name != "blue" || blue.Addressing != "encrypted" || blue.ids() != "1" || blue.IDs[0].State != "current" ||
		blue.IDs[0].Key != "" {
		t.Errorf("created %+v, want blue, encrypted, with id 1 and no key", blue)
	}
	prints(t, "tenant red created: id 2, clear\n", "tenant", "create", "red", "--addressing", "clear")
	refused(t, ExitFailed, "tenant blue exists already", "tenant", "create", "blue")
	refused(t, ExitUsage, "tenant name \"Blue\"", "tenant", "create", "Blue")
	refused(t, ExitUsage, "encrypted or clear", "tenant", "create", "green", "--addressing", "plain")
	refused(t, ExitUsage, "", "tenant", "create")
	refused(t, ExitUsage, "text or json", "tenant", "create", "yellow", "-o", "yaml")
	refused(t, ExitFailed, "no tenant \"yellow\"", "tenant", "get", "yellow")
	refused(t, ExitFailed, "no tenant \"green\"", "tenant", "get", "green")
	if key := ask[tenantView](t, "tenant", "get", "blue", "--show-key").IDs[0].Key; len(key) != 32 {
		t.Errorf("key %q, want 32 digits", key)
	}
	if r := command(t, "tenant", "get", "blue", "-o", "json"); !strings.Contains(r.stdout, `"nodes": []`) ||
		!strings.Contains(r.stdout, `"apps": []`) {
		t.Errorf("a tenant without containers: %s", r.stdout)
	}
	if key := ask[tenantView](t, "tenant", "get", "blue").IDs[0].Key; key != "" {
		t.Error("tenant get shows the key without --show-key")
	}
	prints(t, "NAME   PREFIX   STATE   ROUTE THE FABRIC MUST HAVE\n", "node", "list")
	if got := ask[[]nodeView](t, "node", "list"); got == nil || len(got) != 0 {
		t.Errorf("no nodes: %v, want an empty list", got)
	}

	joined := func(name, uuid string) *join.Client {
		client, err := join.Dial(t.Context(), join.Config{
			URL: "https://" + s.Addr().String(), Token: s.Token(), StateDir: t.TempDir(),
			NodeName: name, NodeUUID: uuid, Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(client.Close)
		if _, err := client.Register(t.Context(),
			connect.NewRequest(&pilasterv1.RegisterRequest{UplinkAddresses: []string{"2001:db8:70:1::2", "2001:db8::2"},
				Enforces: []string{"netpila"}})); err != nil {
			t.Fatal(err)
		}
		return client
	}
	client := joined("n1", "00000000-0000-4000-8000-000000000001")
	stream := client.Follow(t.Context())
	if err := stream.Send(&pilasterv1.FollowRequest{HostedTenants: []string{"blue"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Receive(); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Resolve(t.Context(),
		connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue",
			Labels: map[string]string{"app": "web"}})); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Receive(); err != nil { // the app; now the orchestrator knows that n1 hosts the tenant
		t.Fatal(err)
	}

	if r := command(t, "node", "list"); !strings.Contains(
		r.stdout,
		"\nn1     fd70:696c:6100:1::/64   connected   fd70:696c:6100:1::/64 via 2001:db8:70:1::2\n",
	) {
		t.Errorf("node list: %s, want n1 connected, with its route", r.stdout)
	}
	if n := ask[nodeView](t, "node", "get", "n1"); n.Route != "fd70:696c:6100:1::/64 via 2001:db8:70:1::2" ||
		n.State != "connected" ||
		strings.Join(n.Tenants, " ") != "blue" ||
		strings.Join(n.Enforces, " ") != "netpila" {
		t.Errorf("node get: %+v, want n1 connected, with route, tenant blue and network netpila", n)
	}
	if r := command(t, "node", "get", "n1"); !strings.Contains(r.stdout, "policies     enforced on netpila\n") {
		t.Errorf("node get: %s, want policies enforced on netpila", r.stdout)
	}
	if r := command(t, "tenant", "get", "blue"); !strings.Contains(r.stdout, "app=web\n") ||
		strings.Contains(r.stdout, "key") ||
		!strings.Contains(r.stdout, "id           1   current, held by n1") {
		t.Errorf("tenant get: %s, want app=web and id 1 held by n1, without the key", r.stdout)
	}
	for _, c := range []struct{ says, line string }{
		{"n1\n:4\n", "node get"}, {"n1\n:4\n", "node delete"}, {":4\n", "node get n1"},
		{"blue\n", "tenant get"}, {"blue\n", "tenant delete"}, {"blue\n", "tenant rotate-key"},
	} {
		if r := command(t, append(append([]string{"__complete"}, strings.Fields(c.line)...),
			"")...); !strings.HasPrefix(
			r.stdout,
			c.says,
		) {
			t.Errorf("%s <TAB>: %q, want prefix %q", c.line, r.stdout, c.says)
		}
	}
	rotate(t, stream)
	refused(t, ExitFailed, "has containers on n1", "tenant", "delete", "blue")
	refused(t, ExitFailed, "stop its agent first", "node", "delete", "n1")
	refused(t, ExitFailed, "no node \"n2\"", "node", "delete", "n2")
	if r := command(t, "tenant", "delete", "red"); r.code != ExitDone || r.stdout != "tenant red deleted\n" {
		t.Errorf("tenant delete: %+v", r)
	}
	if got := ask[[]tenantView](t, "tenant", "list"); len(got) != 1 || got[0].Name != "blue" {
		t.Errorf("tenant list: %+v, want only blue", got)
	}
	stream.CloseRequest()
	for ; err == nil; _, err = stream.Receive() {
	}
	stream.CloseResponse()
	if n := ask[nodeView](t, "node", "get", "n1"); n.State != "away" {
		t.Errorf("after the stream ended, n1 is %s, want away", n.State)
	}
	if r := command(t, "node", "delete", "n1"); r.code != ExitDone {
		t.Errorf("node delete: %+v, want exit %d", r, ExitDone)
	}

	// Another machine with the certificate of n2 stays connected.
	thief := joined("n2", "00000000-0000-4000-8000-000000000002")
	taken := thief.Follow(t.Context())
	if err := taken.Send(&pilasterv1.FollowRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := taken.Receive(); err != nil {
		t.Fatal(err)
	}
	refused(t, ExitFailed, "use --force", "node", "delete", "n2")
	if r := command(t, "node", "delete", "n2", "--force"); r.code != ExitDone || r.stdout != "node n2 deleted\n" {
		t.Errorf("node delete --force: %+v", r)
	}
	for ; err == nil; _, err = taken.Receive() {
	}
	taken.CloseResponse()
}

func TestOrchestratorFlags(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		says string
		args []string
	}{
		{"--base-prefix", []string{"--base-prefix", "x"}},
		{"--private-prefix", []string{"--private-prefix", "x"}},
		{"--etcd", []string{"--etcd-ca", "ca.pem"}},
		{"set both or none", []string{"--etcd", "https://[::1]:1", "--etcd-cert", "c.pem"}},
		{"at least 1", []string{"--max-connections", "0"}},
		{"at least 1", []string{"--max-strangers", "-1"}},
		{"at least 1", []string{"--max-joins", "0"}},
		{"at least 0", []string{"--list-rate", "-1"}},
		{"--gateway-prefix", []string{"--gateway-prefix", "x"}},
		{"same address family", []string{"--gateway-prefix", "100.64.0.0/10,10.0.0.0/8"}},
		{"unknown flag", []string{"--nonsense"}},
		{"", []string{"argument"}},
	} {
		refused(
			t,
			ExitUsage,
			c.says,
			append([]string{"orchestrator", "--data-dir", dir, "--run-dir", dir}, c.args...)...)
	}
	refused(t, ExitUsage, "overlap", "orchestrator", "--data-dir", dir, "--run-dir", dir, "--base-prefix", "fc11::/40")
	refused(
		t,
		ExitUsage,
		"/20 or shorter",
		"orchestrator",
		"--data-dir",
		dir,
		"--run-dir",
		dir,
		"--gateway-prefix",
		"100.64.0.0/24",
	)
	refused(
		t,
		ExitFailed,
		"https://host:2379",
		"orchestrator",
		"--data-dir",
		dir,
		"--run-dir",
		dir,
		"--etcd",
		"host:2379",
	)
}

func TestVersion(t *testing.T) {
	v := ask[versionView](t, "version")
	if !strings.HasPrefix(v.Version, "v0.") || !strings.HasPrefix(v.Go, "go") || v.Platform == "" {
		t.Errorf("version -o json: %+v, want release, Go version and platform", v)
	}
	if r := command(t, "--version"); r.stdout != "pilaster "+v.Version+"\n" {
		t.Errorf("pilaster --version prints %q, want %q", r.stdout, v.Version)
	}
	if r := command(t, "version"); !strings.HasPrefix(r.stdout, "pilaster "+v.Version) ||
		!strings.HasPrefix(programVersion(), v.Version) {
		t.Errorf("version: %+v, want prefix pilaster %s", r, v.Version)
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if r := command(t, "completion", shell); r.code != ExitDone || !strings.Contains(r.stdout, "pilaster") {
			t.Errorf("%s: exit %d", shell, r.code)
		}
	}
	if r := command(t, "__complete", "tenant", "create", "--addressing", ""); !strings.Contains(r.stdout, "clear") {
		t.Errorf("--addressing <TAB>: %q, want clear", r.stdout)
	}
}
