package cli

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

// recordAgent is an agent of n3 that records one address.
type recordAgent struct {
	pilasterv1connect.UnimplementedAgentServiceHandler
}

func (recordAgent) FindEgressAddress(
	_ context.Context, r *connect.Request[pilasterv1.FindEgressAddressRequest],
) (*connect.Response[pilasterv1.FindEgressAddressResponse], error) {
	at := func(text string) *timestamppb.Timestamp {
		t, err := time.Parse(time.RFC3339, text)
		if err != nil {
			panic(err)
		}
		return timestamppb.New(t)
	}
	if r.Msg.Address != "2001:db8:7:3:0:ff:101:2f" {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("another node's"))
	}
	resp := &pilasterv1.FindEgressAddressResponse{Node: "n3", Since: at("2026-11-01T00:00:00Z")}
	all := []*pilasterv1.EgressHolder{
		{
			Tenant: "blue", Pod: "web-7f9c", ContainerId: "c1", Interface: "eth0", From: at("2026-11-20T13:58:12Z"),
			Until: at("2026-11-20T15:20:40Z"),
		},
		{Tenant: "red", ContainerId: "c2", Interface: "eth0", From: at("2026-11-21T08:00:00Z")},
	}
	for _, h := range all {
		if r.Msg.At == nil || !r.Msg.At.AsTime().Before(h.From.AsTime()) &&
			(h.Until == nil || r.Msg.At.AsTime().Before(h.Until.AsTime())) {
			resp.Holders = append(resp.Holders, h)
		}
	}
	return connect.NewResponse(resp), nil
}

func TestEgressWho(t *testing.T) {
	socket := serve(t, recordAgent{})
	const first = "blue / web-7f9c (n3), from 13:58:12 until 15:20:40\n"
	const address = "2001:db8:7:3:0:ff:101:2f"
	const second = "red / c2 (n3), from 2026-11-21T08:00:00Z; it still has it\n"
	const none = "no container of n3 had " + address + " at 2026-11-20T13:05:00Z; the record of this node begins at " +
		"2026-11-01T00:00:00Z\n"
	for line, want := range map[string]struct {
		code      int
		out, errs string
	}{
		address + " --at 2026-11-20T14:05":          {0, first, ""},
		address + " --at 2026-11-20T15:05:00+01:00": {0, first, ""},
		address + " --at 2026-11-22T00:00":          {0, second, ""},
		address:                                     {0, second, ""},
		address + " --at 2026-11-20T13:05":          {ExitFailed, none, ""},
		address + " --at 2226-11-20T14:05":          {ExitUsage, "", "in the future"},
		address + " --at yesterday":                 {ExitUsage, "", "write a time as 2026-11-20T14:05"},
		"2001:db8:7:4:0:ff:101:2f":                  {ExitFailed, "", "another node's"},
		"here":                                      {ExitUsage, "", "here"},
	} {
		args := append([]string{"egress", "who", "--agent-socket", socket}, strings.Fields(line)...)
		code, out, errs := run(t, "", args...)
		if code != want.code || !strings.Contains(out, want.out) || !strings.Contains(errs, want.errs) {
			t.Errorf("%s: exit %d, want %d; stdout %q, want %q; stderr %q, want %q", line, code, want.code, out,
				want.out, errs, want.errs)
		}
	}
	_, out, _ := run(t, "", "egress", "who", "--agent-socket", socket, address, "-o", "json")
	var v holdersView
	if err := json.Unmarshal([]byte(out), &v); err != nil || v.Node != "n3" || len(v.Holders) != 2 ||
		v.Holders[0].Until == nil || v.Holders[1].Until != nil || v.Holders[1].ContainerID != "c2" {
		t.Errorf("%v: %s", err, out)
	}
}
