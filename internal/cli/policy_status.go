package cli

import (
	"cmp"
	"fmt"
	"io"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
)

// policiesView is the state of the policies of a node.
type policiesView struct {
	Tenants  uint32        `json:"tenants"`
	Rules    uint32        `json:"rules"`
	Entries  []entryView   `json:"entries"`
	Sessions *sessionsView `json:"sessions"` // null if the agent cannot read them
	Hits     []hitsView    `json:"hits"`
}

type sessionsView struct {
	Used            uint32 `json:"used"`
	Capacity        uint32 `json:"capacity"`
	HalfOpen        uint32 `json:"halfOpen"`
	Begun           uint64 `json:"begun"`
	Evicted         uint64 `json:"evicted"` // half-open sessions that were evicted to make room for another session
	Refused         uint64 `json:"refused"` // sessions that were not created because the table was full
	LargestEndpoint uint32 `json:"largestEndpoint,omitempty"`
	Largest         string `json:"largest,omitempty"`
	LargestUsed     uint32 `json:"largestUsed,omitempty"`

	LargestTenant     string `json:"largestTenant,omitempty"`
	LargestTenantUsed uint32 `json:"largestTenantUsed,omitempty"`
}

// hitsView is how many packets a rule has denied.
type hitsView struct {
	Tenant  string `json:"tenant"`
	Policy  string `json:"policy"`
	Rule    string `json:"rule"`
	Mode    string `json:"mode"` // "enforce", or "audit": then the packets passed, and would have been denied by "enforce"
	Packets uint64 `json:"packets"`
}

func viewHits(hits []*pilasterv1.RuleHits) []hitsView {
	views := []hitsView{}
	for _, h := range hits {
		views = append(
			views,
			hitsView{h.Tenant, h.Rule.GetPolicy(), h.Rule.GetRule(), policyMode(h.Rule.GetAudit()), h.Packets},
		)
	}
	return views
}

func viewPolicies(p *pilasterv1.Policies) *policiesView {
	if p == nil {
		return nil
	}
	v := &policiesView{Tenants: p.Tenants, Rules: p.Rules, Entries: []entryView{}, Hits: viewHits(p.Hits)}
	for _, e := range p.Entries {
		v.Entries = append(v.Entries, entryView{e.Table, e.Used, e.Capacity, e.Cache})
	}
	if s := p.Sessions; s != nil {
		v.Sessions = &sessionsView{
			s.Used,
			s.Capacity,
			s.HalfOpen,
			s.Begun,
			s.Evicted,
			s.Refused,
			s.LargestEndpoint,
			s.Largest,
			s.LargestUsed,
			s.LargestTenant,
			s.LargestTenantUsed,
		}
	}
	return v
}

func (p *policiesView) rows(row func(name, value, state, rest string)) {
	if p == nil {
		return
	}
	var denied, audited uint64
	for _, h := range p.Hits {
		if h.Mode == policyMode(true) {
			audited += h.Packets
		} else {
			denied += h.Packets
		}
	}
	row("policies", "", "enforced", fmt.Sprintf(
		"%s of %s; packets denied: %s, in audit mode: %s   pilaster policy hits",
		humanize.Of(
			p.Rules,
			"rule",
			"rules",
		),
		humanize.Of(p.Tenants, "tenant", "tenants"),
		humanize.Grouped(denied),
		humanize.Grouped(audited),
	))
	for _, e := range p.Entries {
		row("", "", e.Table, e.text())
	}
	if s := p.Sessions; s != nil {
		of := humanize.Grouped(s.Used) + " of " + humanize.Grouped(s.Capacity)
		if s.LargestUsed > 1 {
			of += fmt.Sprintf(
				", of which endpoint %d %s has %s",
				s.LargestEndpoint,
				s.Largest,
				humanize.Grouped(s.LargestUsed),
			)
		}
		if s.LargestTenantUsed > 1 {
			of += fmt.Sprintf(", and tenant %s %s", s.LargestTenant, humanize.Grouped(s.LargestTenantUsed))
		}
		row(
			"",
			"",
			"sessions",
			fmt.Sprintf(
				"%s; %s half open; since start %s evicted, %s refused",
				of,
				humanize.Grouped(s.HalfOpen),
				humanize.Grouped(s.Evicted),
				humanize.Grouped(s.Refused),
			),
		)
	}
}

func newPolicyHits(env Env) *cobra.Command {
	var socket agentSocket
	var out output
	var tenant string
	cmd := &cobra.Command{
		Use:   "hits",
		Short: "Show how many packets each rule denied on this node",
		Long: `Show the rules that denied packets on this node, with the number of packets. For a policy in audit mode,
the number is what the rule would have denied; those packets passed. When a rule is deleted, its counter
is deleted too.`,
		Example: "  pilaster policy hits\n  pilaster policy hits --tenant blue -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().
				ListRuleHits(cmd.Context(), connect.NewRequest(&pilasterv1.ListRuleHitsRequest{Tenant: tenant}))
			if err != nil {
				return err
			}
			views := viewHits(resp.Msg.Hits)
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "TENANT\tMODE\tPACKETS\tRULE")
				for _, v := range views {
					fmt.Fprintf(
						w,
						"%s\t%s\t%s\t%s\n",
						v.Tenant,
						v.Mode,
						humanize.Grouped(v.Packets),
						cmp.Or(v.Rule, v.Policy),
					)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.Flags().StringVar(&tenant, "tenant", "", "show only this tenant")
	return cmd
}
