package store_test

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	offloading "pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
	"pilaster.io/pilaster/internal/tenant"
)

// offloader registers and connects nodes that can take part in offloads.
func offloader(t *testing.T, s *store.Store, nodes ...int) {
	t.Helper()
	for _, n := range nodes {
		r := store.Registration{
			Node: node(n), Enforces: []string{tenant.Nimitz}, Gateway: true, Offloads: true,
			MTUReserve: tenant.OffloadOverhead, Instance: session(n).Instance,
		}
		if _, err := s.Register(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		if err := s.Connect(t.Context(), node(n), session(n)); err != nil {
			t.Fatal(err)
		}
	}
}

// offloadable creates a nimitz tenant with a policy and containers on nodes that can take part in offloads.
func offloadable(t *testing.T, s *store.Store, name, cidr string, nodes ...int) {
	t.Helper()
	nimitz(t, s, name, cidr)
	offloader(t, s, nodes...)
	for _, n := range nodes {
		if _, _, err := s.Resolve(t.Context(), node(n), 1, name, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.ApplyPolicies(t.Context(), name, policies("1", "a"), store.Applying{}); err != nil {
		t.Fatal(err)
	}
}

// inStore decodes a record of the store.
func inStore(t *testing.T, etcd *clientv3.Client, key string, to proto.Message) {
	t.Helper()
	resp, err := etcd.Get(t.Context(), "/pilaster/1/"+key)
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("%s: got %v, %v; want one record", key, resp, err)
	}
	if err := protojson.Unmarshal(resp.Kvs[0].Value, to); err != nil {
		t.Fatal(err)
	}
}

func rawTenant(t *testing.T, etcd *clientv3.Client, name string) *pilasterv1.Tenant {
	t.Helper()
	of := new(pilasterv1.Tenant)
	inStore(t, etcd, "tenants/"+name, of)
	return of
}

func offload(s *store.Store, of string, backend int, frontends ...int) (*pilasterv1.Offload, error) {
	is := store.Offloading{Tenant: of, Node: node(backend).Name, Count: len(frontends)}
	for _, n := range frontends {
		is.Frontends = append(is.Frontends, node(n).Name)
	}
	return s.StartOffload(context.Background(), is)
}

// wantOffloads checks a tenant's offloads, each as "backend phase frontend, frontend-", where "-" marks a frontend that
// is not active. It returns the tenant.
func wantOffloads(t *testing.T, etcd *clientv3.Client, name string, want ...string) *pilasterv1.Tenant {
	t.Helper()
	of := rawTenant(t, etcd, name)
	var got []string
	for _, o := range of.Offloads {
		var frontends []string
		for _, f := range o.Frontends {
			mark := ""
			if f.Draining {
				mark = "-"
			}
			frontends = append(frontends, f.Node+mark)
		}
		phase := strings.ToLower(strings.TrimPrefix(o.Phase.String(), "OFFLOAD_PHASE_"))
		got = append(got, fmt.Sprintf("%s %s %s", o.Node, phase, strings.Join(frontends, ", ")))
	}
	if strings.Join(got, "; ") != strings.Join(want, "; ") {
		t.Errorf("tenant %s has offloads %q, want %q", name, got, want)
	}
	return of
}

func testStartOffload(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	offloadable(t, s, "green", "fd12:3456::/48", 1, 2)
	offloader(t, s, 3, 4, 5)
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		t.Fatal(err)
	}
	nimitz(t, s, "bare", "10.0.0.0/16")
	if _, _, err := s.Resolve(ctx, node(1), 1, "bare", nil); err != nil {
		t.Fatal(err)
	}
	register(t, s, 6) // no offloads, and not connected
	edge := store.Registration{
		Node: node(7), Edge: true, Enforces: []string{tenant.Nimitz}, Offloads: true,
	}
	if _, err := s.Register(ctx, edge); err != nil {
		t.Fatal(err)
	}
	away := store.Registration{Node: node(8), Enforces: []string{tenant.Nimitz}, Offloads: true}
	if _, err := s.Register(ctx, away); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		tenant    string
		backend   int
		frontends []int
		reason    store.Reason
		want      string
	}{
		{"green", 1, nil, store.Invalid, "1, 2, 4 or 8 frontends, not 0"},
		{"green", 1, []int{2, 3, 4}, store.Invalid, "not 3"},
		{"green", 1, []int{1, 2}, store.Invalid, "its own frontend"},
		{"green", 1, []int{2, 2}, store.Invalid, "named twice"},
		{"Green", 1, []int{2}, store.Invalid, "tenant name"},
		{"red", 1, []int{2}, store.NotFound, `no tenant "red"`},
		{"blue", 1, []int{2}, store.Refused, "only tenants on network nimitz"},
		{"bare", 1, []int{2}, store.Refused, "no policies"},
		{"green", 9, []int{2}, store.NotFound, `no node "n9"`},
		{"green", 3, []int{2}, store.Refused, "node n3 has no containers of tenant green"},
		{"green", 1, []int{9}, store.NotFound, `no node "n9"`},
		{"green", 1, []int{6}, store.Refused, "node n6 cannot take part in offloads"},
		{"green", 1, []int{7}, store.Refused, "Edge Switch"},
		{"green", 1, []int{8}, store.Refused, "node n8 is not connected"},
	} {
		_, err := offload(s, c.tenant, c.backend, c.frontends...)
		refused(t, err, c.reason, c.want, "")
	}
	_, err := s.StartOffload(ctx, store.Offloading{Tenant: "green", Node: "n1", Count: 4, Frontends: []string{"n2"}})
	refused(t, err, store.Refused, "node n1 cannot have 4 frontends: too few nodes fit")
	dry := store.Offloading{Tenant: "green", Node: "n1", Count: 1, Frontends: []string{"n2"}, DryRun: true}
	if made, err := s.StartOffload(ctx, dry); err != nil || made.Id != 0 || len(made.Frontends) != 1 {
		t.Errorf("dry run: %v, %v; want one frontend and no id", made, err)
	}
	dry.Loss = "gain 0.5"
	if _, err := s.StartOffload(ctx, dry); err != nil {
		t.Errorf("dry run of a loss: %v", err)
	}
	dry.DryRun = false
	_, err = s.StartOffload(ctx, dry)
	refused(t, err, store.Refused, "the offload would be a loss: gain 0.5; nothing was changed: use --force")
	wantOffloads(t, etcd, "green")

	before := rawTenant(t, etcd, "green").Changes
	made, err := offload(s, "green", 1, 3, 2)
	if err != nil || made.Id != 1 || made.Epoch == 0 || made.Since != before+1 || made.Prefix == "" ||
		made.Changed == nil {
		t.Errorf("got %v, %v; want id 1, an epoch, and since %d", made, err, before+1)
	}
	of := wantOffloads(t, etcd, "green", "n1 preparing n3-, n2-")
	if of.Changes != before+1 {
		t.Errorf("the tenant has %d changes, want %d", of.Changes, before+1)
	}
	_, err = offload(s, "green", 1, 4)
	refused(t, err, store.Exists, "offloaded already", "pilaster offload get green --node n1")
	err = s.DeletePolicies(ctx, "green", policies("1", "a"))
	refused(t, err, store.Refused, "has offloads", "pilaster offload stop green --node n1")
	hosting := []*pilasterv1.Hosting{{Tenant: "green", Accepts: []uint32{1}, Holds: []uint32{1}}}
	if _, err := s.RecordHosting(ctx, node(3), 2, hosting, nil); err != nil {
		t.Fatal(err)
	}
	_, err = offload(s, "green", 3, 4) // n3 hosts it as a frontend only
	refused(t, err, store.Refused, "no containers")
	allocate(t, s, 3, "green", "c1/eth0")
	if _, err := offload(s, "green", 3, 4); err != nil {
		t.Errorf("a frontend with a container: %v", err)
	}
	allocate(t, s, 2, "green", "c1/eth0")
	if _, err := offload(s, "green", 2, 3); err != nil { // n2 is a frontend of the first one too
		t.Error(err)
	}

	// A node with containers and with a smaller reserve.
	small := store.Registration{
		Node: node(5), Instance: session(5).Instance, Enforces: []string{tenant.Nimitz}, Offloads: true,
		MTUReserve: tenant.OffloadOverhead - 1,
	}
	if _, err := s.Register(ctx, small); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Resolve(ctx, node(5), 1, "green", nil); err != nil {
		t.Fatal(err)
	}
	_, err = offload(s, "green", 5, 3)
	refused(t, err, store.Refused, "96 bytes", "n5 (95)")

	// What needs a tenant without offloads.
	for _, to := range []string{tenant.Netpila, tenant.EVPN} {
		_, err = s.Migrate(ctx, "green", to, 0)
		refused(t, err, store.Refused, "on n1, n2, n3 are offloaded", "pilaster offload stop green --node NODE")
	}
	refused(t, s.DeleteTenant(ctx, "green"), store.Refused, "offloaded")

	of = rawTenant(t, etcd, "green")
	for len(of.Offloads) < tenant.MaxOffloads {
		of.Offloads = append(of.Offloads, &pilasterv1.Offload{Node: fmt.Sprint("full", len(of.Offloads))})
	}
	putTenant(t, etcd, of)
	_, err = offload(s, "green", 5, 3)
	refused(t, err, store.Full, "64 offloads")
	of.Offloads, of.Leaving = nil, tenant.Netpila
	putTenant(t, etcd, of)
	_, err = offload(s, "green", 1, 2)
	refused(t, err, store.Refused, "migrating")
}

func testOffloadSteps(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	offloadable(t, s, "green", "fd12:3456::/48", 1)
	offloader(t, s, 2, 3)
	made, err := offload(s, "green", 1, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	apply := func(c offloading.Change, want bool) {
		t.Helper()
		c.Key = offloading.Key{Tenant: "green", Node: "n1"}
		if applied, err := s.ChangeOffload(ctx, c); err != nil || applied != want {
			t.Errorf("%+v: applied is %v, %v; want %v", c, applied, err, want)
		}
	}
	advance := func(to tenant.OffloadPhase, frontends ...tenant.Frontend) (since uint64) {
		t.Helper()
		was := rawTenant(t, etcd, "green").Offloads[0]
		c := offloading.Change{Kind: offloading.Advance, Since: was.Since, Phase: to, Frontends: frontends, Want: 2}
		apply(c, true)
		apply(c, false) // the second orchestrator is late
		of := rawTenant(t, etcd, "green")
		if is := of.Offloads[0]; is.Since != was.Since+1 || is.Since != of.Changes || is.Epoch != made.Epoch ||
			is.Wanted != 2 {
			t.Errorf("after the step the offload is %v, and the tenant has %d changes; want one more", is, of.Changes)
		}
		return was.Since
	}
	n2, n3, n4 := tenant.Frontend{Node: "n2"}, tenant.Frontend{Node: "n3"}, tenant.Frontend{Node: "n4"}
	_, err = s.ChangeOffload(ctx, offloading.Change{
		Key: offloading.Key{Tenant: "green", Node: "n1"}, Since: made.Since, Phase: tenant.OffloadDual,
	})
	refused(t, err, store.Invalid, "no active frontend")
	_, err = s.ChangeOffload(ctx, offloading.Change{
		Key: offloading.Key{Tenant: "green", Node: "n1"}, Since: made.Since, Phase: tenant.OffloadPreparing,
		Frontends: []tenant.Frontend{n4},
	})
	refused(t, err, store.NotFound, `no node "n4"`)
	advance(tenant.OffloadPreparing, n2, n3)
	offloader(t, s, 4)
	n4.Draining = true
	advance(tenant.OffloadDual, n2, n3, n4)
	if f := wantOffloads(t, etcd, "green", "n1 dual n2, n3, n4-").Offloads[0].Frontends[2]; f.Prefix == "" {
		t.Error("an added frontend has no prefix")
	}
	old := advance(tenant.OffloadActive, n2, n3)
	wantOffloads(t, etcd, "green", "n1 active n2, n3")
	apply(offloading.Change{Kind: offloading.End, Since: old}, false)
	stop := func(now bool, want string) {
		t.Helper()
		if _, err := s.StopOffload(ctx, "green", "n1", now); err != nil {
			t.Error(err)
		}
		wantOffloads(t, etcd, "green", want)
	}
	stop(false, "n1 returning n2, n3")
	stop(false, "n1 returning n2, n3")
	stop(true, "n1 ending n2, n3")
	stop(false, "n1 ending n2, n3")
	apply(offloading.Change{Kind: offloading.End, Since: rawTenant(t, etcd, "green").Offloads[0].Since}, true)
	wantOffloads(t, etcd, "green")
	_, err = s.StopOffload(ctx, "green", "n1", false)
	refused(t, err, store.NotFound, "are not offloaded")
	if again, err := offload(s, "green", 1, 2); err != nil || again.Id != 2 || again.Epoch == made.Epoch {
		t.Errorf("the next offload is %v, %v; want id 2 and another epoch than %d", again, err, made.Epoch)
	}
	stop(false, "n1 ending n2-")
	none := offloading.Change{Key: offloading.Key{Tenant: "none", Node: "n1"}, Kind: offloading.End, Since: made.Since}
	if applied, err := s.ChangeOffload(ctx, none); err != nil || applied {
		t.Errorf("a step of a deleted tenant: %v, %v", applied, err)
	}
}

// testLoads: a report of a node's load is recorded for the machine that has its stream, with a lease.
func testLoads(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	register(t, s, 1)
	load := &pilasterv1.NodeLoad{Node: "n1", Own: 0.5}
	count := func() int64 {
		t.Helper()
		resp, err := etcd.Get(ctx, "/pilaster/1/load/n1")
		if err != nil {
			t.Fatal(err)
		}
		if resp.Count > 0 && resp.Kvs[0].Lease == 0 {
			t.Error("the record has no lease")
		}
		return resp.Count
	}
	if err := s.RecordLoad(ctx, node(1), "i1", load); err != nil || count() != 0 {
		t.Errorf("without a stream: %d records, %v", count(), err)
	}
	connect(t, s, 1)
	refused(t, s.RecordLoad(ctx, node(1), "clone", load), store.Exists, "n1 is connected already")
	if err := s.RecordLoad(ctx, node(1), session(1).Instance, load); err != nil || count() != 1 {
		t.Errorf("%d records, %v; want one", count(), err)
	}
	is := new(pilasterv1.NodeLoad)
	if inStore(t, etcd, "load/n1", is); is.Own != 0.5 {
		t.Errorf("recorded %v", is)
	}
	refused(t, s.RecordLoad(ctx, node(2), "i2", load), store.Refused, "not registered")
}

// Two orchestrators start offloads of one tenant concurrently: each backend gets one, and no id is used twice.
func testConcurrentOffloads(t *testing.T, etcd *clientv3.Client) {
	stores := []*store.Store{open(t, etcd, address.Plan{}), open(t, etcd, address.Plan{})}
	backends := []int{1, 2, 3, 4, 5, 6}
	offloadable(t, stores[0], "green", "fd12:3456::/48", backends...)
	offloader(t, stores[0], 7)
	var mu sync.Mutex
	ids, started := map[uint32]bool{}, 0
	var work sync.WaitGroup
	for _, n := range backends {
		for _, s := range stores {
			work.Go(func() {
				made, err := offload(s, "green", n, 7)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					refused(t, err, store.Exists)
					return
				}
				started, ids[made.Id] = started+1, true
			})
		}
	}
	work.Wait()
	of := rawTenant(t, etcd, "green")
	if started != len(backends) || len(ids) != len(backends) || len(of.Offloads) != len(backends) {
		t.Errorf("%d offloads started with %d ids, and %d recorded; want %d", started, len(ids), len(of.Offloads),
			len(backends))
	}
}

func testDeletedOffloader(t *testing.T, etcd *clientv3.Client) {
	ctx, s := t.Context(), open(t, etcd, address.Plan{})
	offloadable(t, s, "green", "fd12:3456::/48", 1, 2)
	offloader(t, s, 3, 4, 5, 6)
	for _, o := range [][]int{{1, 3, 4, 5, 6}, {2, 3}} {
		if _, err := offload(s, "green", o[0], o[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	for _, was := range rawTenant(t, etcd, "green").Offloads {
		c := offloading.Change{
			Key: offloading.Key{Tenant: "green", Node: was.Node}, Kind: offloading.Advance, Since: was.Since,
			Phase: tenant.OffloadActive,
		}
		for _, f := range was.Frontends {
			c.Frontends = append(c.Frontends, tenant.Frontend{Node: f.Node})
		}
		if applied, err := s.ChangeOffload(ctx, c); err != nil || !applied {
			t.Fatal(applied, err)
		}
	}
	publish(t, s, "green", "web", 3) // another change of the same record
	if err := s.DeleteNode(ctx, "n3", true); err != nil {
		t.Fatal(err)
	}
	of := wantOffloads(t, etcd, "green", "n1 active n4, n5, n6-", "n2 ending ")
	if len(of.Publications) != 0 {
		t.Errorf("publications are left: %v", of.Publications)
	}
	if err := s.DeleteNode(ctx, "n1", true); err != nil {
		t.Fatal(err)
	}
	wantOffloads(t, etcd, "green", "n2 ending ")
}

// A restore drops offloads, and does not reuse their ids. It keeps whether offloads are automatic.
// TestLastPolicyOfOffload: deletions by two orchestrators at the same time do not leave an offload without rules.
func TestLastPolicyOfOffload(t *testing.T) {
	etcd := storetest.Embedded(t)
	s, other := open(t, etcd, address.Plan{}), open(t, etcd, address.Plan{})
	offloadable(t, s, "green", "10.0.0.0/16,24", 1, 2)
	const policiesInAll = 8
	var names []string
	for i := range policiesInAll - 1 {
		names = append(names, fmt.Sprint("b", i))
	}
	if _, err := s.ApplyPolicies(t.Context(), "green", policies("1", names...), store.Applying{}); err != nil {
		t.Fatal(err)
	}
	if _, err := offload(s, "green", 1, 2); err != nil {
		t.Fatal(err)
	}
	var deleting sync.WaitGroup
	failures := make(chan error, policiesInAll)
	for i, name := range append(names, "a") {
		by := []*store.Store{s, other}[i%2]
		deleting.Go(func() { failures <- by.DeletePolicies(t.Context(), "green", policies("", name)) })
	}
	deleting.Wait()
	close(failures)
	failed := 0
	for err := range failures {
		if err != nil {
			refused(t, err, store.Refused, "at least one policy")
			failed++
		}
	}
	if has, err := s.HasPolicies(t.Context(), "green"); err != nil || !has || failed != 1 {
		t.Errorf("policies are left: %v, %v; %d of %d deletions were refused, want 1", has, err, failed, policiesInAll)
	}
}

func TestRestoreDropsOffloads(t *testing.T) {
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	data, file := filepath.Join(dir, "data"), filepath.Join(dir, "backup")
	e, err := store.Embed(t.Context(), data, log)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, e.Client, address.Plan{})
	offloadable(t, s, "green", "fd12:3456::/48", 1, 2)
	if _, err := offload(s, "green", 1, 2); err != nil {
		t.Fatal(err)
	}
	if err := s.RecordLoad(t.Context(), node(1), session(1).Instance, &pilasterv1.NodeLoad{Node: "n1"}); err != nil {
		t.Fatal(err)
	}
	for _, on := range []bool{true, false, true} {
		if err := s.SetOffloadAuto(t.Context(), on); err != nil {
			t.Fatal(err)
		}
	}
	e.Close()
	if _, err := store.Backup(t.Context(), data, file, log); err != nil {
		t.Fatal(err)
	}
	restored := filepath.Join(dir, "restored")
	if _, err := store.Restore(t.Context(), file, restored, 10, log); err != nil {
		t.Fatal(err)
	}
	if e, err = store.Embed(t.Context(), restored, log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	s = open(t, e.Client, address.Plan{})
	wantOffloads(t, e.Client, "green")
	for key, want := range map[string]string{"offload-auto": "on", "load/n1": ""} {
		resp, err := e.Client.Get(t.Context(), "/pilaster/1/"+key)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, kv := range resp.Kvs {
			got = string(kv.Value)
		}
		if got != want {
			t.Errorf("after the restore %s is %q, want %q", key, got, want)
		}
	}
	offloader(t, s, 1, 2)
	if made, err := offload(s, "green", 1, 2); err != nil || made.Id != 12 {
		t.Errorf("after the restore: %v, %v; want id 12", made, err)
	}
}

// A node's report about an offload is recorded, and replaced by one with a later sequence number only.
func TestReportAboutOffload(t *testing.T) {
	etcd := storetest.Embedded(t)
	s := open(t, etcd, address.Plan{})
	offloadable(t, s, "green", "fd12:3456::/48", 1, 2)
	if _, err := offload(s, "green", 1, 2); err != nil {
		t.Fatal(err)
	}
	report := func(sequence, changes uint64) {
		t.Helper()
		h := &pilasterv1.Hosting{
			Tenant: "green", Holds: []uint32{1}, AppliedChanges: changes, LostFrontends: []string{"n2"},
			PoliciesRevision: int64(changes), AnsweringFrontends: []string{"n2"},
			Offloaded: []*pilasterv1.OffloadedEndpoint{{Addresses: [][]byte{{10, 0, 0, 1}}, App: 1}},
		}
		if _, err := s.RecordHosting(t.Context(), node(1), sequence, []*pilasterv1.Hosting{h}, nil); err != nil {
			t.Fatal(err)
		}
	}
	report(2, 5)
	report(4, 6)
	report(3, 5)
	if _, _, err := s.Resolve(t.Context(), node(1), 5, "green", nil); err != nil {
		t.Fatal(err)
	}
	h := new(pilasterv1.Hosting)
	inStore(t, etcd, "hosting/green/n1", h)
	if h.AppliedChanges != 6 || len(h.Offloaded) != 1 || len(h.LostFrontends) != 1 || h.Sequence != 5 ||
		h.PoliciesRevision != 6 || len(h.AnsweringFrontends) != 1 {
		t.Errorf("recorded %v, want 6 applied changes and policies of revision 6, one container, one frontend that "+
			"is lost and answers, and sequence 5", h)
	}
}
