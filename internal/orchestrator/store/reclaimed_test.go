package store_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// holding is a node that registers and says that it was given these, each with its key.
func holding(s *store.Store, n int, held ...string) error {
	r := store.Registration{Node: node(n)}
	for i := 0; i < len(held); i += 3 {
		r.Mappings = append(r.Mappings, &pilasterv1.Mapping{Tenant: held[i], To: held[i+1], Key: held[i+2]})
	}
	_, err := s.Register(context.Background(), r)
	return err
}

func testRecallMappings(t *testing.T, etcd *clientv3.Client) {
	s := open(t, etcd, address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/16,24", "fd12:3456::/48,80")
	nimitz(t, s, "lime", "10.0.0.0/16")
	hosts(t, s, "green", 1, 2)
	hosts(t, s, "lime", 1, 2)
	allocate(t, s, 1, "green", "")
	allocate(t, s, 1, "lime", "c1/eth0")

	for name, c := range map[string]struct {
		held   []string
		reason store.Reason
		words  string
	}{
		"another node's subnet":      {[]string{"green", "10.0.1.0/24", ""}, store.Refused, "belongs to node n1"},
		"another node's address":     {[]string{"lime", "10.0.0.2/32", "c1/eth0"}, store.Refused, "belongs to node n1"},
		"not a prefix of the tenant": {[]string{"green", "10.1.0.0/24", ""}, store.Refused, "not a prefix of the tenant"},
		"of another length":          {[]string{"green", "10.0.7.0/25", ""}, store.Refused, "not a prefix of the tenant"},
		"a subnet with a key":        {[]string{"green", "10.0.7.0/24", "c1/eth0"}, store.Refused, "not a prefix of the tenant"},
		"after a good one":           {[]string{"green", "10.0.7.0/24", "", "green", "10.0.1.0/24", ""}, store.Refused, "nothing more was accepted"},
		"no prefix":                  {[]string{"green", "10.0.7", ""}, store.Invalid, "10.0.7"},
		"no name":                    {[]string{"a/b", "10.0.7.0/24", ""}, store.Invalid, "a/b"},
	} {
		before := s.Revision()
		refused(t, holding(s, 2, c.held...), c.reason, c.words)
		if s.Revision() != before {
			t.Errorf("%s: something was changed", name)
		}
	}

	// What the store has forgotten is the node's again, and what comes next is another.
	for range 2 {
		if err := holding(s, 2, "green", "10.0.2.0/24", "", "green", "fd12:3456:0:0:9::/80", "", "lime", "10.0.0.3/32", "c2/eth0", "gone", "10.0.2.0/24", ""); err != nil {
			t.Fatal(err)
		}
	}
	if got := allocate(t, s, 2, "green", ""); got != "10.0.2.0/24 fd12:3456:0:0:9::/80" {
		t.Errorf("node 2 has %s", got)
	}
	hosts(t, s, "green", 3)
	hosts(t, s, "lime", 3)
	if got := allocate(t, s, 3, "green", ""); got != "10.0.3.0/24 fd12:3456:0:0:a::/80" {
		t.Errorf("node 3 has %s", got)
	}
	if got := allocate(t, s, 3, "lime", "c3/eth0"); got != "10.0.0.4/32" {
		t.Errorf("and %s", got)
	}
	// Of itself a node knows more than the store: another subnet, and another container at an address.
	if err := holding(s, 2, "green", "10.0.8.0/24", "", "green", "fd12:3456:0:0:9::/80", "", "lime", "10.0.0.3/32", "c9/eth0"); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "green"); !slices.Contains(got, "10.0.8.0/24 n2") ||
		slices.Contains(got, "10.0.2.0/24 n2") ||
		!slices.Contains(got, "fd12:3456:0:0:9::/80 n2") ||
		len(got) != 6 {
		t.Errorf("mappings are %v", got)
	}
	if got := allocate(t, s, 2, "lime", "c9/eth0"); got != "10.0.0.3/32" {
		t.Errorf("the container has %s", got)
	}
	if got := allocate(t, s, 2, "lime", "c2/eth0"); got != "10.0.0.5/32" {
		t.Errorf("the one before has %s", got)
	}
	// What a key was given after the node said so is not taken from it, and goes with it.
	if err := s.Free(t.Context(), node(2), "lime", "c9/eth0"); err != nil {
		t.Fatal(err)
	}
	anew := allocate(t, s, 2, "lime", "c9/eth0")
	if err := holding(s, 2, "lime", "10.0.0.3/32", "c9/eth0"); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "lime"); !slices.Contains(got, anew+" n2") || !slices.Contains(got, "10.0.0.3/32 n2") ||
		allocate(t, s, 2, "lime", "c9/eth0") != anew {
		t.Errorf("it was given %s, and mappings are %v", anew, got)
	}
	if err := s.Free(t.Context(), node(2), "lime", "c9/eth0"); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "lime"); slices.Contains(got, anew+" n2") || slices.Contains(got, "10.0.0.3/32 n2") {
		t.Errorf("given back, mappings are %v", got)
	}
	// It may have hosted the tenant since the backup, and hosts it no more when it follows.
	if err := holding(s, 4, "green", "10.0.9.0/24", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RecordHosting(t.Context(), node(4), 5, nil, []string{"green"}); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "green"); slices.Contains(got, "10.0.9.0/24 n4") {
		t.Errorf("mappings are %v", got)
	}
}

// A restored store gives nothing that may have been given since the backup, and takes no rest for eternal.
func TestRestoreLeavesOutOverlays(t *testing.T) {
	log, dir := slog.New(slog.DiscardHandler), t.TempDir()
	e, err := store.Embed(t.Context(), dir, log)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, e.Client, address.Plan{})
	nimitz(t, s, "green", "10.0.0.0/24,27", "fd12:3456::/48,80")
	hosts(t, s, "green", 1, 2, 3)
	for n := range 3 {
		allocate(t, s, n+1, "green", "")
	}
	if _, err := s.RecordHosting(t.Context(), node(3), 2, nil, []string{"green"}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "backup")
	if _, err := store.Backup(t.Context(), dir, file, log); err != nil {
		t.Fatal(err)
	}
	e.Close()
	again := t.TempDir()
	if _, err := store.Restore(t.Context(), file, again, 100, log); err != nil {
		t.Fatal(err)
	}
	if e, err = store.Embed(t.Context(), again, log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	s = open(t, e.Client, address.Plan{})
	hosts(t, s, "green", 4)
	// 1 to 3 were given, and 4 would be next of 8; of those to come half are left out.
	if got := allocate(t, s, 4, "green", ""); got != "10.0.0.0/27 fd12:3456:0:0:68::/80" {
		t.Errorf("a node has %s", got)
	}
	if got := allocate(t, s, 1, "green", ""); got != "10.0.0.32/27 fd12:3456:0:0:1::/80" {
		t.Errorf("one from before has %s", got)
	}
	if rest, err := e.Client.Get(t.Context(), "/pilaster/1/resting/", clientv3.WithPrefix()); err != nil ||
		len(rest.Kvs) != 0 {
		t.Errorf("%v rest, %v", rest.Kvs, err)
	}
}
