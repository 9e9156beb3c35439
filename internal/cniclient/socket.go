package cniclient

import (
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// socketKey is of the configuration.
const socketKey = "agentSocket"

// findSocket is where the configuration says that the agent listens, or the refusal of it.
func (c *Call) findSocket(config []byte) (socket, refused string) {
	const cannot = "the network configuration cannot be used: "
	socket, other := c.agentSocket(config)
	switch {
	case other != "":
		return "", c.refusal(codeConfig, cannot, `it has the key "`, other, `", which is written `, socketKey)
	case socket == "":
		return DefaultSocket, ""
	case socket[0] != '/':
		return "", c.refusal(codeConfig, cannot, socketKey, ` "`, socket, `" is not an absolute path`)
	case len(socket) >= len(c.address.Path):
		return "", c.refusal(
			codeConfig,
			cannot,
			socketKey,
			` "`,
			socket,
			`" has more than the 107 bytes that the path of a socket has at most; choose another --run-dir for the agent`,
		)
	}
	return socket, ""
}

// agentSocket is the text of that key of the configuration, of which the last counts, as far as there is room for it;
// empty where there is none. other is the same key in another case. It is right for JSON, and the agent refuses what is
// not.
func (c *Call) agentSocket(config []byte) (socket, other string) {
	depth := 0
	for i := 0; i < len(config); i++ {
		switch config[i] {
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		case '"':
			text, after := stringAt(config, i)
			i = after - 1
			colon := skipSpace(config, after)
			if depth != 1 || colon == len(config) || config[colon] != ':' {
				continue
			}
			if key := unquote(c.key[:0], text); view(key) != socketKey {
				if strings.EqualFold(view(key), socketKey) {
					other = view(add(c.other[:0], view(key)))
				}
				continue
			}
			socket = ""
			i = skipSpace(config, colon+1) - 1 // whatever stands there is looked at next
			if i+1 < len(config) && config[i+1] == '"' {
				text, after := stringAt(config, i+1)
				socket, i = view(unquote(c.socket[:0], text)), after-1
			}
		}
	}
	return socket, other
}

func skipSpace(text []byte, i int) int {
	for i < len(text) && (text[i] == ' ' || text[i] == '\t' || text[i] == '\n' || text[i] == '\r') {
		i++
	}
	return i
}

// stringAt is what stands between the quote at i and the one that ends the string, and the place behind that.
func stringAt(text []byte, i int) (inside []byte, after int) {
	for end := i + 1; end < len(text); end++ {
		switch text[end] {
		case '\\':
			end++
		case '"':
			return text[i+1 : end], end + 1
		}
	}
	return nil, len(text)
}

var escapes = [...]byte{'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// unquote adds the text of a string to out, as far as that has room for any character.
func unquote(out, s []byte) []byte {
	for i := 0; i < len(s) && cap(out)-len(out) >= utf8.UTFMax; i++ {
		if s[i] != '\\' || i+1 == len(s) {
			out = add(out, view(s[i:][:1]))
			continue
		}
		i++
		switch c := s[i]; {
		case c == 'u':
			r := hex4(s[i+1:])
			i += 4
			if utf16.IsSurrogate(r) && i+2 < len(s) && s[i+1] == '\\' && s[i+2] == 'u' {
				if both := utf16.DecodeRune(r, hex4(s[i+3:])); both != utf8.RuneError {
					r = both
					i += 6
				}
			}
			out = addRune(out, r)
		case int(c) < len(escapes) && escapes[c] != 0:
			out = add(out, view(escapes[c:][:1]))
		default: // itself
			out = add(out, view(s[i:][:1]))
		}
	}
	return out
}

func hex4(s []byte) rune {
	if len(s) < 4 {
		return utf8.RuneError
	}
	var r rune
	for _, c := range s[:4] {
		if c > '9' {
			c += 9
		}
		r = r<<4 | rune(c&15)
	}
	return r
}
