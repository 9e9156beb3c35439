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

// holding registers a node that reports mappings: for each the tenant, the prefix and the key.
func holding(s *store.Store, n int, held ...string) error {
	r := store.Registration{Node: node(n)}
	for i := 0; i < len(held); i += 3 {
		r.Mappings = append(r.Mappings, &pilasterv1.Mapping{Tenant: held[i], To: held[i+1], Key: held[i+2]})
	}
	_, err := s.Register(context.Background(), r)
	return err
}

// A node reports its mappings: the store accepts those that it has lost, and refuses those that contradict it.
func testReclaimMappings(t *testing.T, etcd *clientv3.Client) {
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
		"another node's subnet":  {[]string{"green", "10.0.1.0/24", ""}, store.Refused, "belongs to node n1"},
		"another node's address": {[]string{"lime", "10.0.0.2/32", "c1/eth0"}, store.Refused, "belongs to node n1"},
		"outside the tenant":     {[]string{"green", "10.1.0.0/24", ""}, store.Refused, "not a prefix of the tenant"},
		"another length":         {[]string{"green", "10.0.7.0/25", ""}, store.Refused, "not a prefix of the tenant"},
		"a subnet with a key": {
			[]string{"green", "10.0.7.0/24", "c1/eth0"}, store.Refused, "not a prefix of the tenant",
		},
		"after a valid mapping": {
			[]string{"green", "10.0.7.0/24", "", "green", "10.0.1.0/24", ""},
			store.Refused, "nothing more was accepted",
		},
		"invalid prefix": {[]string{"green", "10.0.7", ""}, store.Invalid, "10.0.7"},
		"invalid name":   {[]string{"a/b", "10.0.7.0/24", ""}, store.Invalid, "a/b"},
	} {
		before := s.Revision()
		refused(t, holding(s, 2, c.held...), c.reason, c.words)
		if s.Revision() != before {
			t.Errorf("%s: the refused registration made a change", name)
		}
	}

	// The store records mappings that it has lost, and allocates higher ones.
	for range 2 {
		err := holding(s, 2, "green", "10.0.2.0/24", "", "green", "fd12:3456:0:0:9::/80", "",
			"lime", "10.0.0.3/32", "c2/eth0", "gone", "10.0.2.0/24", "")
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := allocate(t, s, 2, "green", ""); got != "10.0.2.0/24 fd12:3456:0:0:9::/80" {
		t.Errorf("node 2 has %s, want the reported subnets", got)
	}
	hosts(t, s, "green", 3)
	hosts(t, s, "lime", 3)
	if got := allocate(t, s, 3, "green", ""); got != "10.0.3.0/24 fd12:3456:0:0:a::/80" {
		t.Errorf("node 3 has %s, want the next subnets", got)
	}
	if got := allocate(t, s, 3, "lime", "c3/eth0"); got != "10.0.0.4/32" {
		t.Errorf("node 3 has address %s, want 10.0.0.4/32", got)
	}
	// A node's report replaces its mappings in the store: here its subnet, and the container that has an address.
	err := holding(s, 2, "green", "10.0.8.0/24", "", "green", "fd12:3456:0:0:9::/80", "",
		"lime", "10.0.0.3/32", "c9/eth0")
	if err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "green"); !slices.Contains(got, "10.0.8.0/24 n2") ||
		slices.Contains(got, "10.0.2.0/24 n2") ||
		!slices.Contains(got, "fd12:3456:0:0:9::/80 n2") ||
		len(got) != 6 {
		t.Errorf("mappings are %v, want 10.0.8.0/24 instead of 10.0.2.0/24", got)
	}
	if got := allocate(t, s, 2, "lime", "c9/eth0"); got != "10.0.0.3/32" {
		t.Errorf("the reported container has %s, want 10.0.0.3/32", got)
	}
	if got := allocate(t, s, 2, "lime", "c2/eth0"); got != "10.0.0.5/32" {
		t.Errorf("the container before has %s, want 10.0.0.5/32", got)
	}
	// An old report does not release the current address of a key. Free releases the current and the reported address.
	if err := s.Free(t.Context(), node(2), "lime", "c9/eth0"); err != nil {
		t.Fatal(err)
	}
	current := allocate(t, s, 2, "lime", "c9/eth0")
	if err := holding(s, 2, "lime", "10.0.0.3/32", "c9/eth0"); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "lime"); !slices.Contains(got, current+" n2") || !slices.Contains(got, "10.0.0.3/32 n2") ||
		allocate(t, s, 2, "lime", "c9/eth0") != current {
		t.Errorf("the key has %s, and mappings are %v; want %s and 10.0.0.3/32", current, got, current)
	}
	if err := s.Free(t.Context(), node(2), "lime", "c9/eth0"); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "lime"); slices.Contains(got, current+" n2") || slices.Contains(got, "10.0.0.3/32 n2") {
		t.Errorf("after Free, mappings are %v, want none of the key", got)
	}
	// A node that began to host the tenant after the backup, and then stops hosting it, releases its subnet.
	if err := holding(s, 4, "green", "10.0.9.0/24", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RecordHosting(t.Context(), node(4), 5, nil, []string{"green"}); err != nil {
		t.Fatal(err)
	}
	if got := mapped(t, s, "green"); slices.Contains(got, "10.0.9.0/24 n4") {
		t.Errorf("mappings are %v, want none of node 4", got)
	}
}

// A restore skips prefixes that may have been allocated since the backup. It drops quarantined prefixes: without their
// lease they would never expire.
func TestRestoreSkipsPrefixes(t *testing.T) {
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
	// Subnets 1 to 3 of 8 were allocated, and 4 is the next. The restore skips half of 8: 4 to 7.
	if got := allocate(t, s, 4, "green", ""); got != "10.0.0.0/27 fd12:3456:0:0:68::/80" {
		t.Errorf("node 4 has %s, want the subnets after the skipped ones", got)
	}
	if got := allocate(t, s, 1, "green", ""); got != "10.0.0.32/27 fd12:3456:0:0:1::/80" {
		t.Errorf("node 1 has %s, want its subnets from before the restore", got)
	}
	if quarantined, err := e.Client.Get(t.Context(), "/pilaster/1/resting/", clientv3.WithPrefix()); err != nil ||
		len(quarantined.Kvs) != 0 {
		t.Errorf("in quarantine are %v, %v; want none", quarantined.Kvs, err)
	}
}
