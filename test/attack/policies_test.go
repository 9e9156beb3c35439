package attack_test

import (
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// forbidden is a port to which blue's containers may send nothing.
const forbidden = 4242

const forbid = `
apiVersion: policy.networking.k8s.io/v1alpha2
kind: ClusterNetworkPolicy
metadata: {name: forbid}
spec:
  tier: Admin
  priority: 0
  subject: {namespaces: {}}
  egress:
  - {action: Deny, to: [{namespaces: {}}], protocols: [{udp: {destinationPort: {number: 4242}}}]}
`

// policies attacks with packets that a policy denies, and with fragments without a first fragment.
func (b *bed) policies(t *testing.T) {
	b.apply(t, "blue", forbid)
	self, far, near := b.container(t, "mallory").Address, b.container(t, "b2").Address, b.container(t, "b1").Address
	datagrams := []packet.Packet{datagram(self, far), datagram(self, near)}
	for i := range datagrams {
		datagrams[i].Body = packet.UDP{SourcePort: 7, DestinationPort: forbidden,
			Payload: []byte("this must not arrive")}
	}
	b.untilReceived(t, "n1", "blue")
	b.try(t, from("what a policy forbids", "mallory", dropreason.PolicyDenied, "n1", 0, datagrams...))

	var parts []packet.Packet
	for _, p := range datagrams {
		p.Body, p.Extensions = packet.Raw{Proto: packet.ProtocolUDP,
			Data: []byte("this must not arrive....")}, []packet.Extension{packet.Fragment(64, false, 9)}
		parts = append(parts, p)
	}
	b.try(t, from("a part of nothing", "mallory", dropreason.FragmentUnknown, "n1", 0, parts...))
}

// untilReceived waits until a node has received all policies of a tenant.
func (b *bed) untilReceived(t *testing.T, node, tenant string) {
	t.Helper()
	list, err := b.Operator().ListPolicies(b.ctx, connect.NewRequest(&pilasterv1.ListPoliciesRequest{Tenant: tenant}))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Msg.Policies {
		labtest.Until(t, labtest.Patience, "the policies are on "+node, func() bool {
			status, err := b.Agent(node).Status(b.ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
			if err != nil {
				t.Fatal(err)
			}
			return status.Msg.GetOrchestrator().GetRevision() >= p.Revision
		})
	}
}
