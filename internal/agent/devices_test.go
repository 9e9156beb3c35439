package agent

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/agent/hostnet"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// The agent detects devices that go away while it runs, or did before it subscribed: a DEL may never arrive.
func TestDevicesThatGoAreNoticed(t *testing.T) {
	ns := newNetns(t)
	h, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	b := newBed(t)
	b.add("c1")
	reaped, lost := b.add("c2"), b.add("c3")
	b.add("c4")
	settled := make(chan string, 10)
	b.driver.looked = func(records []endpoint.Record) {
		var names []string
		for _, r := range records {
			names = append(names, r.ContainerID)
		}
		settled <- strings.Join(names, " ")
	}
	b.driver.lost["c1"] = fmt.Errorf("link pil1: %w", dpapi.ErrNoNamespace)
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
		ended <- ns.Do(func() error { return hostnet.WatchDevices(ctx, "eth0", b.Core, slog.New(slog.DiscardHandler)) })
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
	b.driver.mu.Lock()
	b.driver.lost["c2"], b.driver.lost["c3"] = fmt.Errorf("link pil2: %w", dpapi.ErrNoNamespace), errFake
	b.driver.mu.Unlock()
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
	if _, left := b.driver.active[lost.ID]; left || len(b.driver.active) != 1 {
		t.Errorf("active are %v", b.driver.active)
	}
	if err := b.Delete(t.Context(), "c3", "eth0"); err != nil {
		t.Error(err)
	}
}

// A device that goes away by a DEL does not disturb the DEL.
func TestDeviceThatGoesByDelete(t *testing.T) {
	b := newBed(t)
	r := b.add("c1")
	done := make(chan error, 1)
	b.driver.during = func(call string, _ endpoint.Record) {
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
	b.clean()
}
