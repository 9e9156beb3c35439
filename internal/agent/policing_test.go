package agent

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
)

func policyEvent(revision int64, d *pilasterv1.Delta) *pilasterv1.FollowResponse {
	return &pilasterv1.FollowResponse{Revision: revision, WithPolicies: true, Event: &pilasterv1.FollowResponse_Delta{Delta: d}}
}

func said(name, text string) *pilasterv1.Policy {
	return &pilasterv1.Policy{Tenant: "blue", Kind: "NetworkPolicy", Namespace: "default", Name: name, Document: text}
}

// policingBed is of a node with a container of tenant blue; end is called with why the stream ended.
func policingBed(t *testing.T, end func(error)) (*policing, *bed) {
	b, core := newLinkBed(t), newBed(t)
	b.link.config.Tenants = core.tenants
	core.add("c1")
	core.hear(PolicyNews{Tenant: "blue", Whole: true})
	return &policing{link: b.link, core: core.Core, running: new(sync.WaitGroup), end: end}, core
}

// TestPoliciesThatWait: what comes while policies are compiled is in force by one compile more, and until then the stream counts as having told nothing of it.
func TestPoliciesThatWait(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	p, core := policingBed(t, func(err error) { t.Error(err) })
	defer p.running.Wait()
	defer end()
	entered, release := make(chan struct{}), make(chan struct{})
	compiled := 0
	core.driver.during = func(call string, _ endpoint.Record) {
		if call != "SetPolicies" {
			return
		}
		if compiled++; compiled == 1 {
			close(entered)
			<-release
		}
	}
	hear := func(r *pilasterv1.FollowResponse) {
		t.Helper()
		if err := p.hear(ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	hear(policyEvent(6, &pilasterv1.Delta{Policies: []*pilasterv1.Policy{said("p0", webFromDB)}}))
	<-entered
	for i := range int64(50) {
		hear(policyEvent(7+i, &pilasterv1.Delta{Policies: []*pilasterv1.Policy{said(fmt.Sprint("p", i+1), webFromDB)}, EndedPolicies: []*pilasterv1.Policy{said(fmt.Sprint("p", i), "")}}))
	}
	if at := p.link.Status().Revision; at != 0 {
		t.Errorf("the node says that it has revision %d, and nothing is in force", at)
	}
	close(release)
	if err := p.rest(ctx); err != nil {
		t.Fatal(err)
	}
	if at := p.link.Status().Revision; compiled != 2 || at != 56 {
		t.Errorf("51 changes were compiled %d times, and the node has revision %d", compiled, at)
	}
	if has := core.policies.m["blue"].documents; len(has) != 1 || has[policyName{"NetworkPolicy", "default", "p50"}].Text == "" {
		t.Errorf("it has %v", has)
	}
	hear(policyEvent(57, &pilasterv1.Delta{EndedPolicies: []*pilasterv1.Policy{said("p50", "")}}))
	if err := p.rest(ctx); err != nil || len(core.policies.m["blue"].documents) != 0 || p.link.Status().Revision != 57 {
		t.Errorf("after a rest: %v, %v", err, core.policies.m["blue"].documents)
	}
}

// TestPoliciesThatAreNotKept: what the disk does not take ends the stream at the revision before it.
func TestPoliciesThatAreNotKept(t *testing.T) {
	var why error
	ctx, end := context.WithCancelCause(t.Context())
	p, core := policingBed(t, func(err error) { why = err; end(err) })
	if err := os.RemoveAll(core.policies.dir); err != nil {
		t.Fatal(err)
	}
	if err := p.hear(ctx, policyEvent(6, &pilasterv1.Delta{Policies: []*pilasterv1.Policy{said("deny", denyAll)}})); err != nil {
		t.Fatal(err)
	}
	p.running.Wait()
	if why == nil || p.link.Status().Revision != 0 {
		t.Errorf("the stream ended with %v, at revision %d", why, p.link.Status().Revision)
	}
	if err := p.rest(ctx); err != why {
		t.Errorf("who waits hears %v", err)
	}
}

// TestIsOfPolicies: only what nothing else depends on may wait.
func TestIsOfPolicies(t *testing.T) {
	some := []*pilasterv1.Policy{{Tenant: "blue"}}
	for _, c := range []struct {
		of   *pilasterv1.FollowResponse
		want bool
	}{
		{policyEvent(1, &pilasterv1.Delta{Policies: some}), true},
		{policyEvent(1, &pilasterv1.Delta{EndedPolicies: some, WholePolicies: []string{"blue"}}), true},
		{policyEvent(1, &pilasterv1.Delta{Overrides: []*pilasterv1.Override{{}}}), true},
		{policyEvent(1, &pilasterv1.Delta{EndedOverrides: []*pilasterv1.Override{{}}}), true},
		{policyEvent(1, &pilasterv1.Delta{}), false},
		{&pilasterv1.FollowResponse{Event: policyEvent(1, &pilasterv1.Delta{Policies: some}).Event, Refusals: &pilasterv1.Refusals{}}, false},
		{policyEvent(1, &pilasterv1.Delta{Policies: some, Apps: []*pilasterv1.App{{}}}), false},
		{policyEvent(1, &pilasterv1.Delta{Policies: some, DeletedTenants: []string{"green"}}), false},
		{policyEvent(1, &pilasterv1.Delta{Policies: some, Node: &pilasterv1.Node{}}), false},
		{&pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Snapshot{Snapshot: &pilasterv1.Snapshot{Policies: some}}}, false},
		{&pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Heartbeat{}}, false},
	} {
		if got := isOfPolicies(c.of); got != c.want {
			t.Errorf("%v: %v", c.of, got)
		}
	}
}

// TestTogether: news that are put together say what they say one after the other.
func TestTogether(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	names := func() (some []Document) {
		for i := range 4 {
			if r.IntN(3) == 0 {
				some = append(some, document(fmt.Sprint("p", i), fmt.Sprintf(`{"text": %d}`, r.IntN(100))))
			}
		}
		return some
	}
	for range 2000 {
		begun := newPoliced().hear(PolicyNews{Documents: names(), Overrides: map[netip.Addr]address.AppID{netip.AddrFrom4([4]byte{0: 1}): 9}})
		one := begun
		var news []PolicyNews
		for range 1 + r.IntN(5) {
			n := PolicyNews{Tenant: "blue", Whole: r.IntN(6) == 0, Documents: names(), Ended: names(), Overrides: map[netip.Addr]address.AppID{}}
			for i := range byte(3) {
				switch a := netip.AddrFrom4([4]byte{i}); r.IntN(4) {
				case 0:
					n.Overrides[a] = address.AppID(1 + r.IntN(9))
				case 1:
					n.Back = append(n.Back, a)
				}
			}
			news, one = append(news, n), one.hear(n)
		}
		all := byTenant(news)
		if len(all) != 1 {
			t.Fatalf("%d of one tenant", len(all))
		}
		if is := begun.hear(all[0]); !maps.Equal(is.documents, one.documents) || !maps.Equal(is.overrides, one.overrides) || len(is.unread) != len(one.unread) || len(is.parsed) != len(one.parsed) {
			t.Fatalf("of %+v: together %v, %v; one after the other %v, %v", news, is.documents, is.overrides, one.documents, one.overrides)
		}
	}
}
