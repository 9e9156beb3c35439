package orchestrator

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/rpc"
)

func listChanges(t *testing.T, c *join.Client, tenant string, after int64) (*pilasterv1.ListMappingsResponse, error) {
	t.Helper()
	resp, err := c.ListMappings(
		t.Context(),
		connect.NewRequest(&pilasterv1.ListMappingsRequest{Tenant: tenant, AfterRevision: after}),
	)
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}

// describe returns the mappings of a response as text, sorted: each prefix with its node, and with its key if it has
// one.
func describe(r *pilasterv1.ListMappingsResponse) string {
	var all []string
	for _, m := range r.Mappings {
		all = append(all, strings.TrimSpace(m.To+" "+m.Name+" "+m.Key))
	}
	for _, m := range r.EndedMappings {
		all = append(all, "ended "+m.To)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// A node that lists mappings after a revision receives the changes since that revision. With WithoutMappings, its
// stream has no mappings.
func TestChangedMappings(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	createNimitz(t, s, "lime", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n1, "green", "web")
	resolve(t, n2, "green", "web")
	resolve(t, n2, "lime", "web")
	f := follow(t, n1, &pilasterv1.FollowRequest{HostedTenants: []string{"green"}, WithoutMappings: true})
	f.next(t)
	page, err := list(t, n1, "green")
	if err != nil {
		t.Fatal(err)
	}
	after := page.Revision
	for i, step := range []struct {
		do   func()
		want string
	}{
		{func() {}, ""},
		{func() {
			allocate(t, n1, "green", "c1/eth0")
			allocate(t, n2, "green", "c2/eth0")
			allocate(t, n2, "lime", "")
		}, "10.0.0.2/32 n1 c1/eth0, 10.0.0.3/32 n2"},
		{func() {
			allocate(t, n2, "green", "c3/eth0")
			for _, key := range []string{"c2/eth0", "c3/eth0"} {
				request := connect.NewRequest(&pilasterv1.FreeRequest{Tenant: "green", Key: key})
				if _, err := n2.Free(t.Context(), request); err != nil {
					t.Fatal(err)
				}
			}
		}, "ended 10.0.0.3/32, ended 10.0.0.4/32"},
	} {
		step.do()
		r, err := listChanges(t, n1, "green", after)
		if err != nil || describe(r) != step.want || r.NextPageToken != "" || r.Revision < after {
			t.Errorf("step %d: got %q at revision %d, %v; want %q", i, describe(r), r.GetRevision(), err, step.want)
		}
		after = r.GetRevision()
	}
	resolve(t, n1, "green", "db")
	if d := f.next(t).GetDelta(); len(d.GetApps()) != 1 || len(d.GetMappings())+len(d.GetEndedMappings()) > 0 {
		t.Errorf("got %v on the stream, want one app and no mappings", d)
	}

	_, err = listChanges(t, n1, "lime", after)
	wantCode(t, err, connect.CodePermissionDenied)
	for _, unknown := range []int64{1, after + 1000, -1} {
		_, err = listChanges(t, n1, "green", unknown)
		if wantCode(t, err, connect.CodeAborted); err != nil &&
			!strings.Contains(err.Error(), "begin with the first page") {
			t.Errorf("after revision %d: got error %v", unknown, err)
		}
	}
	_, err = n1.ListMappings(
		t.Context(),
		connect.NewRequest(
			&pilasterv1.ListMappingsRequest{Tenant: "green", AfterRevision: after, PageToken: "7:0a000002/32"},
		),
	)
	wantCode(t, err, connect.CodeInvalidArgument)
}

// Queries for changes count towards the tenant's query rate, and have an event label of their own in the metric.
func TestChangedMappingsAreThrottledAndCounted(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Limits.Lists = 3
	s := start(t, c)
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	n1 := registered(t, s, testNode(1))
	resolve(t, n1, "green", "web")
	page, err := list(t, n1, "green")
	if err != nil {
		t.Fatal(err)
	}
	accepted, refused := 0, 0
	for range 12 {
		if _, err := listChanges(t, n1, "green", page.Revision); err != nil {
			wantCode(t, err, connect.CodeResourceExhausted)
			refused++
		} else {
			accepted++
		}
	}
	if refused == 0 {
		t.Error("no query was refused, of 13 with a rate of 3 a second")
	}
	wantRefusals(t, s, admission.LimitLists, refused)
	for event, want := range map[string]int{"": 1, rpc.EventChanges: accepted} {
		name := fmt.Sprintf("pilaster_orchestrator_messages_total{direction=%q,event=%q,procedure=%q}",
			rpc.Sent, event, pilasterv1connect.NodeServiceListMappingsProcedure)
		if n := metric(t, s.config.RunDir, name); n != want {
			t.Errorf("the metric counts %d responses with event %q, want %d", n, event, want)
		}
	}
}
