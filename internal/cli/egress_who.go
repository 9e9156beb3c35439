package cli

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
)

// holderView is a container that had an egress address.
type holderView struct {
	Tenant      string     `json:"tenant"`
	Pod         string     `json:"pod,omitempty"`
	ContainerID string     `json:"containerId"`
	Interface   string     `json:"interface"`
	From        time.Time  `json:"from"`
	Until       *time.Time `json:"until,omitempty"` // absent: it still has it
}

type holdersView struct {
	Address netip.Addr   `json:"address"`
	Node    string       `json:"node"`
	At      *time.Time   `json:"at,omitempty"`
	Since   *time.Time   `json:"since,omitempty"` // when the record of the node begins; absent if it is empty
	Holders []holderView `json:"holders"`         // oldest first
}

func newEgressWho(env Env) *cobra.Command {
	var out output
	var socket agentSocket
	var at string
	c := &cobra.Command{
		Use:   "who ADDRESS",
		Short: "Show which container has or had an egress address",
		Long: `Show which containers of this node had an egress address, and when, oldest first. With --at, show
only the one that had it at that time. The node's agent records this on disk; the oldest records are deleted when
they exceed 64 MiB. If the address is another node's, the error says where to run the command. The exit
status is 1 if no container had the address.`,
		Example: "  pilaster egress who 2001:db8:7:3:0:ff:101:2f\n" +
			"  pilaster egress who 2001:db8:7:3:0:ff:101:2f --at 2026-11-20T14:05",
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			a, err := address.ParseAny(args[0])
			if err != nil {
				return usage("%w", err)
			}
			req := &pilasterv1.FindEgressAddressRequest{Address: a.String()}
			view := holdersView{Address: a, Holders: []holderView{}}
			if at != "" {
				moment, err := parseMoment(at)
				if err != nil {
					return usage("--at %s: %w", at, err)
				}
				if moment.After(time.Now()) {
					return usage("--at %s is in the future", at)
				}
				req.At, view.At = timestamppb.New(moment), &moment
			}
			resp, err := socket.client().FindEgressAddress(c.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			view.add(resp.Msg)
			if err := out.print(env.Stdout, view, view.text); err != nil {
				return err
			}
			if len(view.Holders) == 0 {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	out.bind(c)
	socket.bind(c)
	c.Flags().StringVar(&at, "at", "",
		"only who had it at this time: 2006-01-02T15:04[:05], in UTC or with a time zone")
	_ = c.RegisterFlagCompletionFunc("at", cobra.NoFileCompletions)
	return c
}

// parseMoment reads a time as operators and logs write it, in UTC if it has no zone.
func parseMoment(s string) (time.Time, error) {
	for _, layout := range []string{
		time.RFC3339, "2006-01-02T15:04Z07:00", "2006-01-02T15:04:05", "2006-01-02T15:04", time.DateTime,
		"2006-01-02 15:04",
	} {
		if t, err := time.Parse(layout, s); err == nil {
			return t.UTC(), nil
		}
	}
	return time.Time{}, fmt.Errorf("write a time as 2026-11-20T14:05 or 2026-11-20T14:05:30Z")
}

func (v *holdersView) add(r *pilasterv1.FindEgressAddressResponse) {
	v.Node = r.Node
	utc := func(t *timestamppb.Timestamp) *time.Time {
		if t == nil {
			return nil
		}
		at := t.AsTime()
		return &at
	}
	v.Since = utc(r.Since)
	for _, h := range r.Holders {
		v.Holders = append(v.Holders, holderView{
			Tenant: h.Tenant, Pod: h.Pod, ContainerID: h.ContainerId, Interface: h.Interface, From: h.From.AsTime(),
			Until: utc(h.Until),
		})
	}
}

func (v holdersView) text(w io.Writer) {
	if len(v.Holders) == 0 {
		when, since := "", "is empty"
		if v.At != nil {
			when = " at " + moment(*v.At)
		}
		if v.Since != nil {
			since = "begins at " + moment(*v.Since)
		}
		fmt.Fprintf(w, "no container of %s had %v%s; the record of this node %s\n", v.Node, v.Address, when, since)
		return
	}
	for _, h := range v.Holders {
		until := "; it still has it"
		if h.Until != nil {
			until = " until " + v.clock(*h.Until)
		}
		fmt.Fprintf(w, "%s / %s (%s), from %s%s\n", h.Tenant, cmp.Or(h.Pod, h.ContainerID), v.Node, v.clock(h.From),
			until)
	}
}

// clock formats a time, without the date on the day that was asked for.
func (v holdersView) clock(t time.Time) string {
	if v.At != nil && t.UTC().Format(time.DateOnly) == v.At.UTC().Format(time.DateOnly) {
		return t.UTC().Format(time.TimeOnly)
	}
	return moment(t)
}
