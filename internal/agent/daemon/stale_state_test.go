package daemon

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/unixrpc"
)

func writeFile(t *testing.T, content string, elem ...string) {
	t.Helper()
	path := filepath.Join(elem...)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Data and socket of an orchestrator on the same machine are not listed. All files of the agent are, also damaged ones.
func TestRemainsBesideAnOrchestrator(t *testing.T) {
	stateDir, run := t.TempDir(), t.TempDir()
	writeFile(t, "{", stateDir, state.NodeFileName)
	writeFile(t, "{", stateDir, "endpoints", "7.json")
	writeFile(t, "", stateDir, ".writing-node.json-1")
	writeFile(t, "    7\n", stateDir, endpoint.LastIDFile)
	writeFile(t, "etcd", stateDir, "orchestrator", "db")
	writeFile(t, "", run, agentSocket)
	writeFile(t, "", run, "orchestrator.sock")

	gateway := filepath.Join(run, "gateway")
	writeFile(t, "", gateway)
	before := []network.StaleState{{Kind: "file", Name: gateway, Remove: func() error { return os.Remove(gateway) }}}

	r, err := FindStaleState(stateDir, run, before)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if len(r.Endpoints) != 1 || !strings.Contains(r.Endpoints[0], "7.json") || r.Prefix.IsValid() {
		t.Errorf("remains %+v", r)
	}
	if _, err := statefile.Lock(stateDir); err == nil {
		t.Error("an agent could start meanwhile")
	}
	for _, l := range append(before, r.Files...) {
		if err := l.Remove(); err != nil {
			t.Errorf("%s %s: %v", l.Kind, l.Name, err)
		}
	}
	for dir, kept := range map[string]string{stateDir: "orchestrator", run: "orchestrator.sock"} {
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 1 || entries[0].Name() != kept {
			t.Errorf("%s holds %v, %v; wanted %s", dir, entries, err, kept)
		}
	}
	again, err := FindStaleState(stateDir, run, nil)
	if err != nil || len(again.Files) != 0 {
		t.Errorf("again: %+v, %v", again, err)
	}
	if entries, _ := os.ReadDir(stateDir); len(entries) != 1 {
		t.Errorf("looking made %v", entries)
	}
}

func TestRemainsOfARunningAgent(t *testing.T) {
	stateDir, run := t.TempDir(), t.TempDir()
	writeFile(t, "", stateDir, state.NodeFileName)
	lock, err := statefile.Lock(stateDir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := FindStaleState(stateDir, run, nil); err == nil ||
		!strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("a locked state: %v", err)
	}
	lock.Close()
	l, err := unixrpc.Listen(filepath.Join(run, agentSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := FindStaleState(t.TempDir(), run, nil); err == nil || !strings.Contains(err.Error(), "an agent runs") {
		t.Errorf("a socket that answers: %v", err)
	}
}

// TestStaleEgress: a reset finds the /64 of a node's egress addresses, whose route is the agent's.
func TestStaleEgress(t *testing.T) {
	dir := t.TempDir()
	n, err := state.OpenNode(dir, "n1")
	if err != nil {
		t.Fatal(err)
	}
	plan := address.DefaultPlan()
	m := state.Membership{ClusterUUID: "cluster", Prefix: plan.Node(7), Plan: plan}
	for _, c := range []struct{ prefix, want netip.Prefix }{
		{}, {netip.MustParsePrefix("2001:db8:e::/48"), netip.MustParsePrefix("2001:db8:e:7::/64")},
	} {
		m.Plan.Egress = c.prefix
		if err := n.Join(m); err != nil {
			t.Fatal(err)
		}
		r, err := FindStaleState(dir, t.TempDir(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if r.Prefix != m.Prefix || r.Egress != c.want {
			t.Errorf("egress prefix %v: found %v and %v, want %v", c.prefix, r.Prefix, r.Egress, c.want)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
