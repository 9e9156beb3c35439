package control

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// tryAdd adds a container with its own labels.
func (m *member) tryAdd(container, app string) (endpoint.Record, error) {
	q := m.Request(container)
	q.Labels = map[string]string{"app": app}
	return m.Add(m.T.Context(), q)
}

func (c *cluster) tenantAs(name string) *pilasterv1.GetTenantResponse {
	c.t.Helper()
	resp, err := c.op.GetTenant(c.t.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: name}))
	if err != nil {
		c.t.Fatal(err)
	}
	return resp.Msg
}

// meanings fails if two nodes know an app of blue with different labels.
func meanings(t *testing.T, nodes ...*member) {
	t.Helper()
	meaning := map[address.AppID]string{}
	for _, n := range nodes {
		known, _, _ := n.Tenants.Get("blue")
		for _, a := range known.Apps {
			labels := tenant.Canonical(a.Labels)
			if was := meaning[a.ID]; was != "" && was != labels {
				t.Fatalf("app %d is known as %s and as %s", a.ID, was, labels)
			}
			meaning[a.ID] = labels
		}
	}
}

// Containers with more label sets than a tenant may have apps start and end on two nodes. Apps of running containers
// stay. The others end, also on a node that only knows them, but no app ends while a node is disconnected.
func TestAppsEnd(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	c := &cluster{t: t, dir: t.TempDir(), apps: 24}
	c.start("[::1]:0", 0)
	t.Cleanup(func() { c.Close() })
	c.createTenant("blue")
	disk, kernel := t.TempDir(), agenttest.NewDriver()
	n1, n2 := c.boot(t.TempDir(), "n1", agenttest.NewDriver()), c.boot(disk, "n2", kernel)
	n1.until(connected)
	n2.until(connected)
	stays, err := n1.tryAdd("stays", "stays")
	if err != nil {
		t.Fatal(err)
	}
	also, err := n2.tryAdd("also", "also")
	if err != nil {
		t.Fatal(err)
	}
	given := map[address.AppID]string{}
	churn := func(m *member, i int) error {
		r, err := m.tryAdd(fmt.Sprint("c", i), fmt.Sprint("a", i))
		if err != nil {
			return err
		}
		given[r.App] = fmt.Sprint("a", i)
		return m.Delete(t.Context(), r.ContainerID, r.Interface)
	}
	for i := range 14 {
		agenttest.Eventually(t, func() error { return churn([]*member{n1, n2}[i%2], i) })
	}
	n2.stop()
	for i := range 4 { // and the two that stay: three quarters of 24 are reached, and n2 does not answer
		agenttest.Eventually(t, func() error { return churn(n1, 14+i) })
	}
	agenttest.Eventually(t, func() error {
		if of := c.tenantAs("blue"); of.Tenant.RetiringApps == nil || len(of.Apps) != 20 {
			return fmt.Errorf("%d apps, round %v; want 20, and one", len(of.Apps), of.Tenant.RetiringApps)
		}
		return nil
	})
	for i := range 5 {
		if err := churn(n1, 18+i); (err != nil) != (i == 4) || err != nil && !errors.Is(err, refusal.ErrExhausted) {
			t.Fatalf("of four numbers that are left the one after %d: %v", i, err)
		}
	}
	if of := c.tenantAs("blue"); len(of.Apps) != 24 || of.RestingApps != 0 || of.Tenant.RetiringApps.GetForgotten() {
		t.Fatalf(
			"while a node is away there are %d apps, %d rest, round %v; want 24, 0",
			len(of.Apps),
			of.RestingApps,
			of.Tenant.RetiringApps,
		)
	}
	n2 = c.boot(disk, "n2", kernel)
	n2.until(connected)
	left := func(most, resting int) error {
		meanings(t, n1, n2)
		of := c.tenantAs("blue")
		if len(of.Apps) > most || int(of.RestingApps) < resting || of.Tenant.RetiringApps != nil || of.MaxApps != 24 {
			return fmt.Errorf(
				"%d apps of %d, %d rest, round %v; want at most %d, and at least %d",
				len(of.Apps),
				of.MaxApps,
				of.RestingApps,
				of.Tenant.RetiringApps,
				most,
				resting,
			)
		}
		for _, m := range []*member{n1, n2} {
			if known, _, _ := m.Tenants.Get("blue"); len(known.Apps) != len(of.Apps) {
				return fmt.Errorf("a node knows %d apps, and there are %d", len(known.Apps), len(of.Apps))
			}
		}
		return nil
	}
	agenttest.Eventually(t, func() error { return left(17, 7) })
	of := c.tenantAs("blue")
	for _, r := range []endpoint.Record{stays, also} {
		if !slices.ContainsFunc(of.Apps, func(a *pilasterv1.App) bool { return a.Id == uint32(r.App) }) {
			t.Fatalf("app %d of a container that lives has ended: %v", r.App, of.Apps)
		}
	}
	if r, err := n2.tryAdd("other", "stays"); err != nil || r.App != stays.App {
		t.Fatalf("another container of labels that one has is of app %d, want %d: %v", r.App, stays.App, err)
	}
}

// A node's report about retiring apps stays valid after a restart: if the node has reported that it does not use an
// app, it creates no container of this app until the orchestrator assigns the app again.
func TestAnswersOutliveTheAgent(t *testing.T) {
	b := agenttest.New(t)
	web := b.MustAdd("c1")
	db := b.Request("c2")
	db.Labels = map[string]string{"app": "db"}
	used, err := b.Add(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	says := func(round uint64, keeps ...uint32) {
		t.Helper()
		var said pilasterv1.FollowRequest
		b.Tenants.Report(&said, true)
		if h := said.Hosting[0]; h.HeardRound != round || !slices.Equal(h.KeepsApps, keeps) {
			t.Errorf("it reports round %d and keeps %v, want %d, %v", h.HeardRound, h.KeepsApps, round, keeps)
		}
	}
	hear := func(r agent.Retiring) {
		t.Helper()
		of := b.Orchestrator.Tenants["blue"]
		of.Changes++
		b.Orchestrator.Tenants["blue"] = of
		if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: of, Retiring: r}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	hear(agent.Retiring{Round: 7, Apps: []address.AppID{web.App, used.App}})
	says(7, uint32(used.App))
	b.Reopen()
	b.Orchestrator.Err = errors.New("away")
	if _, err := b.Add(t.Context(), b.Request("c3")); err == nil {
		t.Error("a container of an app that others may have by now")
	}
	db.ContainerID = "c4"
	if r, err := b.Add(t.Context(), db); err != nil || r.App != used.App {
		t.Errorf("another container of an app that one has: %v, %v", r.App, err)
	}
	hear(agent.Retiring{Round: 8, Apps: []address.AppID{web.App}, Forgotten: true})
	says(8)
	b.Reopen()
	if known, _, _ := b.Tenants.Get("blue"); len(known.Apps) != 1 || known.Apps[0].ID != used.App {
		t.Errorf("what is forgotten is there again: %v", known.Apps)
	}
}
