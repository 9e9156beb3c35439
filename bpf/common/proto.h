/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Protocol numbers and header layouts of Ethernet, IP, ICMP, UDP and TCP. vmlinux.h has types but no macros. */
#pragma once

#define NULL		    ((void *)0)

#define TC_ACT_OK	    0
#define TC_ACT_SHOT	    2
#define TC_ACT_STOLEN	    4

#define AF_INET		    2
#define AF_INET6	    10

#define ETH_P_IP	    0x0800
#define ETH_P_ARP	    0x0806
#define ETH_P_IPV6	    0x86dd
#define ETH_P_8021Q	    0x8100
#define ETH_P_8021AD	    0x88a8
#define VLAN_VID	    0x0fff
#define ETH_HLEN	    14
#define ETH_ALEN	    6
#define ARPHRD_ETHER	    1
#define PROTO_IPV6	    41 /* IPv6 in IPv6 */
#define IPV6_HLEN	    40
#define IP4_FRAGMENT_OFFSET 0x1fff
#define IP4_MORE_FRAGMENTS  0x2000
#define PACKET_HOST	    0
#define PACKET_BROADCAST    1
#define PACKET_MULTICAST    2
#define PACKET_OTHERHOST    3

#define PROTO_ICMP4	    1
#define NEXTHDR_HOP	    0
#define NEXTHDR_TCP	    6
#define NEXTHDR_UDP	    17
#define NEXTHDR_DCCP	    33
#define NEXTHDR_ROUTING	    43
#define NEXTHDR_FRAGMENT    44
#define NEXTHDR_AUTH	    51
#define NEXTHDR_ICMP	    58
#define NEXTHDR_DEST	    60
#define NEXTHDR_SCTP	    132
#define NEXTHDR_UDPLITE	    136

#define TRANSPORT_MIN	    8 /* length of UDP's header, the shortest with ports */

#define ICMPV6_ERROR_MAX    127
#define ICMPV6_HLEN	    8
#define QUOTED_ADDRESSES    (ICMPV6_HLEN + 8) /* in an ICMPv6 error: offset of the quoted source and destination */

#define GSO_BY_FRAGS	    0xffff
#define LEGACY_MAX_SIZE	    65536      /* GRO_LEGACY_MAX_SIZE: longer packets are those of BIG TCP */
#define JUMBO_HEADER	    0x0600c204 /* the hop-by-hop header of BIG TCP: TCP, 8 bytes, jumbo payload, 4 bytes */
#define JUMBO_OPTION	    8	       /* bytes of the hop-by-hop header with the option */
#define TCP_OFFSET	    12	       /* in the TCP header: the byte with its length in words */

#define OPTION_PAD1	    0
#define OPTION_HOME_ADDRESS 0xc9

#define TCP_FLAGS	    13 /* in the TCP header: the byte with the flags */
#define TCP_FIN		    0x01
#define TCP_SYN		    0x02
#define TCP_RST		    0x04
#define TCP_ACK		    0x10

#define UDP_VXLAN	    4789

/* is_first_segment: the flags are those of the first segment of a TCP connection. */
#define is_first_segment(flags) (((flags) & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN)
