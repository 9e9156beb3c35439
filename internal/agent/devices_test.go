package agent_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/hostnet"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// The agent detects devices that disappear, also before its netlink subscription: a DEL may never arrive.
func TestDevicesThatGoAreNoticed(t *testing.T) {
	ns := agenttest.NewNetns(t)
	h, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	b := newBed(t)
	b.MustAdd("c1")
	reaped, lost := b.MustAdd("c2"), b.MustAdd("c3")
	b.MustAdd("c4")
	settled := make(chan string, 10)
	b.Driver.Looked = func(records []endpoint.Record) {
		var names []string
		for _, r := range records {
			names = append(names, r.ContainerID)
		}
		settled <- strings.Join(names, " ")
	}
	b.Driver.Lost["c1"] = fmt.Errorf("link pil1: %w", dpapi.ErrNoNamespace)
	for _, r := range []endpoint.Record{reaped, lost} {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = r.Device.HostName
		if err := h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far" + attrs.Name}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- ns.Do(func() error {
			return hostnet.WatchDevices(ctx, []string{"eth0"}, b.Core, slog.New(slog.DiscardHandler))
		})
	}()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	wait := func(want string) {
		t.Helper()
		select {
		case got := <-settled:
			if got != want {
				t.Fatalf("%s was looked at, not %s", got, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("no check of %s", want)
		}
	}
	wait("c1 c2 c3 c4") // at first, all, and at once
	b.Driver.Mu.Lock()
	b.Driver.Lost["c2"], b.Driver.Lost["c3"] = fmt.Errorf("link pil2: %w", dpapi.ErrNoNamespace), agenttest.ErrFake
	b.Driver.Mu.Unlock()
	for _, r := range []endpoint.Record{reaped, lost} {
		if err := h.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: r.Device.HostName}}); err != nil {
			t.Fatal(err)
		}
		wait(r.ContainerID)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	ended <- nil
	is := map[string]endpoint.State{}
	for _, r := range b.Endpoints() {
		is[r.ContainerID] = r.State
	}
	if want := map[string]endpoint.State{"c3": endpoint.Lost, "c4": endpoint.Active}; fmt.Sprint(
		is,
	) != fmt.Sprint(
		want,
	) {
		t.Errorf("endpoints %v, want %v", is, want)
	}
	if _, left := b.Driver.Active[lost.ID]; left || len(b.Driver.Active) != 1 {
		t.Errorf("active are %v", b.Driver.Active)
	}
	if err := b.Delete(t.Context(), "c3", "eth0"); err != nil {
		t.Error(err)
	}
}

// The netlink event for a device that a DEL removes does not affect the DEL.
func TestDeviceThatGoesByDelete(t *testing.T) {
	b := newBed(t)
	r := b.MustAdd("c1")
	done := make(chan error, 1)
	b.Driver.During = func(call string, _ endpoint.Record) {
		switch call {
		case "Remove":
			go func() { done <- b.MarkLost(t.Context(), hostnet.OnDevice(r.Device.HostName)) }()
		case "Lose":
			t.Error("it was taken for lost")
		}
	}
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	b.CheckClean()
}
