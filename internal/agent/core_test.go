package agent_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
)

func TestAddMakesAnActiveEndpoint(t *testing.T) {
	b := newBed(t)
	var seen []string
	b.Driver.During = func(call string, r endpoint.Record) {
		switch call {
		case "CreateDevice", "Activate":
			known, _ := b.Store.Find("c1", "eth0")
			_, err := os.Stat(b.Store.RecordPath(known.ID))
			seen = append(seen, fmt.Sprintf("%s %s, on disk %v, %s", call, known.State, err == nil, r.Netns))
		}
	}
	r := b.MustAdd("c1")
	want := []string{
		"CreateDevice preparing, on disk false, /proc/self/fd/9",
		"Activate active, on disk true, /run/netns/c1",
	}
	if !slices.Equal(seen, want) {
		t.Errorf("saw %q, want %q", seen, want)
	}
	p := address.Split(r.Attachments[0].Plaintext)
	if r.State != endpoint.Active || r.Netns != "/run/netns/c1" || r.Device.HostName != "pil1" || p.Tenant != 1 ||
		p.App != 1 ||
		p.Node != agenttest.NodePrefix {
		t.Errorf("record %+v", r)
	}
	if got := b.Driver.Active[r.ID]; got.Device.HostIfindex != r.Device.HostIfindex {
		t.Errorf("activated without its device: %+v", got)
	}
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.CheckClean()
}

// A second endpoint of a known tenant and label set needs no message (design §2), even after a restart and without the
// orchestrator.
func TestKnownTenantAndLabelsNeedNoOrchestrator(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.MustAdd("c2")
	if b.Orchestrator.Calls != 1 {
		t.Fatalf("%d calls for two endpoints alike", b.Orchestrator.Calls)
	}
	b.Orchestrator.Err = refusal.New(refusal.ErrUnavailable, "away")
	b.Reopen()
	b.MustAdd("c3")
	q := b.Request("c4")
	q.Labels = map[string]string{"app": "db"}
	if _, err := b.Add(t.Context(), q); !errors.Is(err, refusal.ErrUnavailable) {
		t.Fatalf("unknown labels with the orchestrator away: %v", err)
	}
	q.Tenant = "red"
	if _, err := b.Add(t.Context(), q); !errors.Is(err, refusal.ErrUnavailable) {
		t.Fatalf("unknown tenant with the orchestrator away: %v", err)
	}
	if n := len(b.Endpoints()); n != 3 {
		t.Errorf("%d endpoints, want 3", n)
	}
}

func TestSecondAddIsRefused(t *testing.T) {
	b := newBed(t)
	first := b.MustAdd("c1")
	if _, err := b.Add(t.Context(), b.Request("c1")); !errors.Is(err, refusal.ErrExists) {
		t.Fatalf("second ADD: %v", err)
	}
	q := b.Request("c1")
	q.Interface = "eth1"
	second, err := b.Add(t.Context(), q)
	if err != nil || second.ID == first.ID {
		t.Fatalf("another interface: %+v, %v", second, err)
	}
}

func TestInvalidRequestsTakeNothing(t *testing.T) {
	b := newBed(t)
	for name, change := range map[string]func(*agent.AddRequest){
		"no container":        func(q *agent.AddRequest) { q.ContainerID = "" },
		"no interface":        func(q *agent.AddRequest) { q.Interface = "" },
		"interface too long":  func(q *agent.AddRequest) { q.Interface = "interface-name-x" },
		"interface a path":    func(q *agent.AddRequest) { q.Interface = "a/b" },
		"interface a pattern": func(q *agent.AddRequest) { q.Interface = "eth%d" }, // the kernel would find a number
		"relative netns":      func(q *agent.AddRequest) { q.Netns = "netns/x" },
		"no tenant":           func(q *agent.AddRequest) { q.Tenant = "" },
		"tenant a path":       func(q *agent.AddRequest) { q.Tenant = "../x" },
		"bad label":           func(q *agent.AddRequest) { q.Labels = map[string]string{"a,b": "c"} },
	} {
		q := b.Request("c1")
		change(&q)
		if _, err := b.Add(t.Context(), q); !errors.Is(err, refusal.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if b.Orchestrator.Calls > 0 || len(b.Driver.Calls) > 3 { // RestorePolicies, Restore and Repair at the start
		t.Errorf("%d calls to the orchestrator, kernel %v", b.Orchestrator.Calls, b.Driver.Calls)
	}
	b.CheckClean()
}

// Any failure rolls back everything, so that the next ADD of the same container succeeds.
func TestFailureAtEachStepLeavesNothing(t *testing.T) {
	for _, step := range []string{"PutTenant", "CreateDevice", "Attach", "Activate"} {
		t.Run(step, func(t *testing.T) {
			b := newBed(t)
			b.Driver.Fail[step] = agenttest.ErrFake
			if _, err := b.Add(t.Context(), b.Request("c1")); !errors.Is(err, agenttest.ErrFake) {
				t.Fatalf("ADD: %v", err)
			}
			b.CheckClean()
			delete(b.Driver.Fail, step)
			b.MustAdd("c1")
		})
	}
	t.Run("unknown tenant", func(t *testing.T) {
		b := newBed(t)
		q := b.Request("c1")
		q.Tenant = "green"
		if _, err := b.Add(t.Context(), q); !errors.Is(err, refusal.ErrNotFound) {
			t.Fatalf("ADD: %v", err)
		}
		b.CheckClean()
	})
	t.Run("record cannot be written", func(t *testing.T) {
		b := newBed(t)
		path := filepath.Join(b.Dir, "endpoints")
		if err := os.Rename(path, path+"-away"); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Add(t.Context(), b.Request("c1")); err == nil {
			t.Fatal("ADD without a record")
		}
		if slices.Contains(b.Driver.Calls, "Activate") {
			t.Error("packets flowed without a record")
		}
		b.CheckClean()
	})
}

// The caller cancels an ADD while it runs: the ADD is rolled back.
func TestRollbackOutlivesTheCaller(t *testing.T) {
	b := newBed(t)
	ctx, cancel := context.WithCancel(t.Context())
	b.Driver.Fail["CreateDevice"] = agenttest.ErrFake
	b.Driver.During = func(call string, _ endpoint.Record) {
		if call == "CreateDevice" {
			cancel()
		}
	}
	if _, err := b.Add(ctx, b.Request("c1")); !errors.Is(err, agenttest.ErrFake) {
		t.Fatalf("ADD: %v", err)
	}
	b.CheckClean()
}

func TestDeleteIsIdempotent(t *testing.T) {
	b := newBed(t)
	for range 2 {
		if err := b.Delete(t.Context(), "never", "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	b.MustAdd("c1")
	for range 2 {
		if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	b.CheckClean()
}

// A full disk must not prevent a DEL.
func TestDeleteWithoutRoomOnDisk(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	away := filepath.Join(b.Dir, "cursors")
	if err := os.Rename(away, away+"-away"); err != nil {
		t.Fatal(err)
	}
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.CheckClean()
}

// After the deletion of a tenant's last endpoint, this node forgets the tenant and reports that.
func TestLastEndpointForgetsTheTenant(t *testing.T) {
	b := newBed(t)
	hosted := func() []string {
		select {
		case <-b.Tenants.Changed():
		default:
			t.Error("no signal that the hosted tenants changed")
		}
		return b.Tenants.Names()
	}
	b.MustAdd("c1")
	if names := hosted(); !slices.Equal(names, []string{"blue"}) {
		t.Errorf("hosted %v", names)
	}
	b.MustAdd("c2")
	for _, c := range []string{"c1", "c2"} {
		if err := b.Delete(t.Context(), c, "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	if names := hosted(); len(names) != 0 {
		t.Errorf("hosted %v", names)
	}
	if files, _ := os.ReadDir(filepath.Join(b.Dir, "tenants")); len(files) > 0 {
		t.Errorf("keys are left on disk: %v", files)
	}
	b.CheckClean()
	b.MustAdd("c3")
	if b.Orchestrator.Calls != 2 {
		t.Errorf("%d calls; a forgotten tenant is asked for again", b.Orchestrator.Calls)
	}
}

// A released id is allocated again after all others, also after a restart: the gateway may have connections of its
// endpoint.
func TestFreedIDsRestOverAStart(t *testing.T) {
	b := newBed(t)
	for _, container := range []string{"c1", "c2", "c3"} {
		b.MustAdd(container)
	}
	if err := b.Delete(t.Context(), "c3", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.Reopen()
	if r := b.MustAdd("c4"); r.ID != 4 {
		t.Errorf("the next endpoint has id %d", r.ID)
	}
	b.Max = 4
	b.Reopen()
	if r := b.MustAdd("c5"); r.ID != 3 {
		t.Errorf("when all others are taken, it has id %d", r.ID)
	}
	// Invalid content, as after a crash of the machine, is ignored.
	path := filepath.Join(b.Dir, endpoint.LastIDFile)
	for _, content := range []string{"", "\x00\x00\x00\x00\x00\x00", "99999\n", "   -1\n"} {
		if err := b.Delete(t.Context(), "c5", "eth0"); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		b.Reopen()
		if r := b.MustAdd("c5"); r.ID != 3 {
			t.Errorf("with %q in the file it has id %d", content, r.ID)
		}
	}
}

func TestKeysOnDiskAreTheOwnersAlone(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	info, err := os.Stat(filepath.Join(b.Dir, "tenants", "blue.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v; want 0600", info, err)
	}
}

func TestGarbageIsExactlyTheUnlisted(t *testing.T) {
	b := newBed(t)
	for _, c := range []string{"keep", "gone1", "gone2"} {
		b.MustAdd(c)
	}
	other := b.Request("elsewhere")
	other.CNINetwork = "other"
	if _, err := b.Add(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	two := b.Request("keep")
	two.Interface = "eth1" // same container, not listed
	if _, err := b.Add(t.Context(), two); err != nil {
		t.Fatal(err)
	}
	removed, err := b.CollectGarbage(
		t.Context(),
		"pilaster",
		func(c, i string) bool { return c == "keep" && i == "eth0" },
	)
	if err != nil {
		t.Fatal(err)
	}
	names := func(records []endpoint.Record) (all []string) {
		for _, r := range records {
			all = append(all, agent.EndpointKey(r.ContainerID, r.Interface))
		}
		slices.Sort(all)
		return all
	}
	if got := names(removed); !slices.Equal(got, []string{"gone1/eth0", "gone2/eth0", "keep/eth1"}) {
		t.Errorf("removed %v", got)
	}
	if got := names(b.Endpoints()); !slices.Equal(got, []string{"elsewhere/eth0", "keep/eth0"}) {
		t.Errorf("left %v", got)
	}
}

// The list that a runtime sends cannot contain an endpoint whose ADD is still running.
func TestGarbageLeavesRunningAddsAlone(t *testing.T) {
	b := newBed(t)
	b.Driver.During = func(call string, _ endpoint.Record) {
		if call == "CreateDevice" {
			if removed, err := b.CollectGarbage(t.Context(), "pilaster",
				func(string, string) bool { return false }); err != nil ||
				len(removed) > 0 {
				t.Errorf("removed %v, %v", removed, err)
			}
		}
	}
	b.MustAdd("c1")
	if len(b.Endpoints()) != 1 {
		t.Error("the endpoint is gone")
	}
}

func TestCheckNamesTheDifference(t *testing.T) {
	b := newBed(t)
	r := b.MustAdd("c1")
	own := netip.PrefixFrom(r.Attachments[0].Address, 128)
	good := agent.CheckRequest{ContainerID: "c1", Interface: "eth0", Netns: r.Netns, Addresses: []netip.Prefix{own}}
	if err := b.Check(t.Context(), good); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*agent.CheckRequest){
		"netns":   func(q *agent.CheckRequest) { q.Netns = "/run/netns/other" },
		"address": func(q *agent.CheckRequest) { q.Addresses = []netip.Prefix{netip.MustParsePrefix("fc00::1/128")} },
	} {
		q := good
		change(&q)
		if err := b.Check(t.Context(), q); !errors.Is(err, refusal.ErrCheck) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	b.Driver.Fail["Check"] = errors.New("route fc00::/8 is missing")
	if err := b.Check(t.Context(), good); !errors.Is(err, refusal.ErrCheck) ||
		!strings.Contains(err.Error(), "route fc00::/8") {
		t.Errorf("kernel's difference: %v", err)
	}
	good.ContainerID = "unknown"
	if err := b.Check(t.Context(), good); !errors.Is(err, refusal.ErrNotFound) {
		t.Errorf("unknown container: %v", err)
	}
}

// If the removal of a tenant from the kernel fails half-way, its next endpoint writes the tenant again.
func TestTenantHalfForgottenIsPutAgain(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.Driver.Fail["DeleteTenant"] = agenttest.ErrFake
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	clear(b.Driver.Tenants)
	b.MustAdd("c2")
	if len(b.Driver.IDs("blue")) != 1 {
		t.Error("the tenant is not in the kernel")
	}
}
