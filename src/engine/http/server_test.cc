#include "engine/http/server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/client/client.h"

namespace tare::engine::http {
namespace {

class RawSocket {
 public:
  explicit RawSocket(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    timeval limit{.tv_sec = 10, .tv_usec = 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  ~RawSocket() { Close(); }
  RawSocket(const RawSocket&) = delete;
  RawSocket& operator=(const RawSocket&) = delete;
  bool connected() const { return connected_; }
  void Send(const std::string& bytes) {
    ASSERT_EQ(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  // Until the peer closes, or `until` is in what came.
  std::string Read(const std::string& until = "") {
    std::string all;
    char buffer[4096];
    for (ssize_t n = 0; (n = ::recv(fd_, buffer, sizeof(buffer), 0)) > 0;) {
      all.append(buffer, static_cast<size_t>(n));
      if (!until.empty() && all.find(until) != std::string::npos) break;
    }
    return all;
  }
  void Close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
  bool connected_ = false;
};

Handler Echo() {
  return [](const std::shared_ptr<const Request>& r, const ResponderPtr& responder) {
    responder->Send(200, "text/plain", r->method + " " + r->path + "?" + r->query + " " + r->body);
  };
}

std::unique_ptr<Server> Start(const ServerConfig& config, Handler handler) {
  Result<std::unique_ptr<Server>> server = Server::Start(config, std::move(handler));
  EXPECT_TRUE(server.ok()) << server.status().ToString();
  return std::move(server).value();
}

TEST(EngineHttp, AnswersAndKeepsAlive) {
  const auto server = Start({}, Echo());
  RawSocket s(server->port());
  s.Send("GET /a?b=c HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_NE(s.Read("GET /a?b=c ").find("200 OK"), std::string::npos);
  s.Send("POST /d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi");
  EXPECT_NE(s.Read("POST /d? hi").find("200 OK"), std::string::npos);
  s.Send("GET /e HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_NE(s.Read().find("Connection: close"), std::string::npos);
}

TEST(EngineHttp, StreamsChunks) {
  const auto server = Start({}, [](const std::shared_ptr<const Request>&, const ResponderPtr& r) {
    r->BeginStream("text/event-stream");
    r->Write("data: 1\n\n");
    r->Write("");
    r->Write("data: 2\n\n");
    r->End();
  });
  RawSocket s(server->port());
  s.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string got = s.Read("0\r\n\r\n");
  EXPECT_NE(got.find("9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n"), std::string::npos)
      << got;
  // HTTP/1.0 knows no chunks: the end of the connection is the end of the stream.
  RawSocket old(server->port());
  old.Send("GET / HTTP/1.0\r\n\r\n");
  const std::string plain = old.Read();
  EXPECT_NE(plain.find("\r\n\r\ndata: 1\n\ndata: 2\n\n"), std::string::npos) << plain;
}

// What is malformed or too large gets a 4xx and the next client is served.
TEST(EngineHttp, RefusesHostileInput) {
  const auto server =
      Start({.max_header_bytes = 2048, .max_body_bytes = 1000, .read_seconds = 0.3}, Echo());
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"NONSENSE\r\n\r\n", "400"},
      {"GET / HTTP/9.9\r\n\r\n", "400"},
      {"GET / HTTP/1.1\r\nBad Header\r\n\r\n", "400"},
      {"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "400"},
      {"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", "400"},
      {"POST / HTTP/1.1\r\nContent-Length: 5000\r\n\r\n", "413"},
      {"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFF\r\n", "413"},
      {"GET / HTTP/1.1\r\nX: " + std::string(5000, 'x') + "\r\n\r\n", "431"},
      {"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc", "408"},  // and then silence
      {std::string("\0\x01\xff\xfe\r\n\r\n", 8), "400"},
  };
  for (const auto& [bytes, status] : cases) {
    RawSocket s(server->port());
    s.Send(bytes);
    const std::string got = s.Read();
    EXPECT_EQ(got.substr(0, 12), "HTTP/1.1 " + status)
        << bytes.substr(0, 60) << " -> " << got.substr(0, 80);
    // Every one names the part of the request.
    const char* param = status == "413" ? "body" : status == "431" ? "headers" : "request";
    EXPECT_NE(got.find(fmt::format("\"param\":\"{}\"", param)), std::string::npos) << got;
  }
  const auto ok = client::Send({.port = server->port()}, {"GET", "/alive", ""});
  ASSERT_TRUE(ok.ok());
  EXPECT_EQ(ok->status, 200);
}

// A vanished client is noticed while its answer is owed, and a dropped Responder is a 500.
TEST(EngineHttp, NoticesVanishedClients) {
  std::atomic<int> gone{0};
  std::vector<ResponderPtr> held;
  std::mutex mutex;
  const auto server =
      Start({}, [&](const std::shared_ptr<const Request>& r, const ResponderPtr& responder) {
        if (r->path == "/drop") return;
        responder->OnClose([&] { gone++; });
        std::lock_guard lock(mutex);
        held.push_back(responder);
      });
  {
    RawSocket s(server->port());
    s.Send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
    for (int i = 0; i < 500 && server->stats().requests == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  for (int i = 0; i < 1000 && gone == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(gone, 1);
  {
    std::lock_guard lock(mutex);
    for (const auto& r : held) r->Send(200, "text/plain", "nobody hears");
    held.clear();
  }
  const auto dropped = client::Send({.port = server->port()}, {"GET", "/drop", ""});
  ASSERT_TRUE(dropped.ok()) << dropped.status().ToString();
  EXPECT_EQ(dropped->status, 500);
}

// A reader that never reads is cut off; the bytes that wait for it are bounded.
TEST(EngineHttp, CutsSlowReaders) {
  const auto server = Start({.max_pending_bytes = 100 << 10},
                            [](const std::shared_ptr<const Request>&, const ResponderPtr& r) {
                              r->BeginStream("text/event-stream");
                              for (int i = 0; i < 1000; ++i) r->Write(std::string(100 << 10, 'x'));
                              r->End();
                            });
  RawSocket s(server->port());
  s.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  for (int i = 0; i < 2000 && server->stats().too_slow == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(server->stats().too_slow, 1);
}

// A thousand clients that send half a request cost no thread and do not keep others out.
TEST(EngineHttp, ThousandSlowClients) {
  const auto server = Start({}, Echo());
  std::vector<std::unique_ptr<RawSocket>> slow;
  for (int i = 0; i < 1000; ++i) {
    slow.push_back(std::make_unique<RawSocket>(server->port()));
    if (!slow.back()->connected()) GTEST_SKIP() << "this machine allows " << i << " sockets";
    slow.back()->Send("POST /v1/completions HTTP/1.1\r\nContent-Le");
  }
  const auto ok =
      client::Send({.port = server->port(), .timeout_seconds = 20}, {"GET", "/alive", ""});
  ASSERT_TRUE(ok.ok()) << ok.status().ToString();
  EXPECT_EQ(ok->status, 200);
  EXPECT_EQ(server->stats().accepted, 1001);
  EXPECT_GE(server->stats().connections, 1000);
}

TEST(EngineHttp, RefusesMoreConnectionsThanAllowed) {
  const auto server = Start({.max_connections = 2}, Echo());
  RawSocket a(server->port()), b(server->port());
  for (int i = 0; i < 1000 && server->stats().connections < 2; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  RawSocket c(server->port());
  EXPECT_EQ(c.Read().substr(0, 12), "HTTP/1.1 503");
}

TEST(EngineHttp, PortTaken) {
  const auto server = Start({}, Echo());
  const auto second = Server::Start({.port = server->port()}, Echo());
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("listen on 127.0.0.1"), std::string::npos);
  EXPECT_FALSE(Server::Start({.host = "no-address"}, Echo()).ok());
}

}  // namespace
}  // namespace tare::engine::http
